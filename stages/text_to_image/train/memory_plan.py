"""The memory of a run on images, from shapes alone; `stages.tuner.memory_plan` has what suits any training."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from stages import kernels
from stages.models import attention
from stages.models.family import Architecture, Family, TransformerConfig
from stages.text_to_image.train.batches import TrainingSampler
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.weights import weight_bits
from stages.tuner.adapters.stacks import Stacks
from stages.tuner.blockwise import planner
from stages.tuner.blockwise.backprop import Plan
from stages.tuner.blockwise.device import memory_budget
from stages.tuner.blockwise.planner import Estimate
from stages.tuner.checkpoint import Checkpoint
from stages.tuner.memory_plan import GB, Candidate, MemoryPlan, Remedy, best_candidate, cheapest_remedy, plan_run
from stages.tuner.ranks import connect
from stages.tuner.step import build_optimizer, choose_targets

LOWEST_RESOLUTION = 256  # pixels: no lower resolution is advised
# `BLOCK_WORK` on a CPU, as measured on FLUX.2's blocks: while Linears are differentiated, and while attention is. MLX starts
# operations ahead there, and their results wait in memory. Waiting for them made steps on two cores 12 to 37 % longer.
ON_CPU = {"work_rates": ((3.35, 1.2), (2.35, 3.7))}
ALONE = 768  # pixels: from this resolution, Metal computes one sample at a time unless [train] micro_batch says otherwise


@dataclass(frozen=True)
class BatchShape:
    """The size of a batch whose images all have one size. A batch that mixes sizes is computed size by size."""

    samples: int
    width: int  # pixels
    height: int
    text_rows: int  # of each text embedding
    pixels_per_token: int  # side of an image token
    held: BatchShape | None = None  # the largest validation batch of the run
    shared: bool = False  # the run may also have batches that mix sizes
    # Images of one size whose references differ in size count as images of different sizes.
    references: tuple[tuple[int, int], ...] = ()  # (height, width) of each reference's latent, in tokens

    @property
    def grid(self) -> tuple[int, int]:
        """(height, width) of a latent, in tokens."""
        return self.height // self.pixels_per_token, self.width // self.pixels_per_token

    @property
    def tokens(self) -> int:
        """Of one sample: its image, its references and its text."""
        return sum(math.prod(grid) for grid in (self.grid, *self.references)) + self.text_rows

    @property
    def resolution(self) -> int:
        """Side of a square with as many tokens as the largest image, references and `held` included; 512 for 1024 x 256."""
        most = max(math.prod(grid) for grid in (self.grid, *self.references))
        own = self.pixels_per_token * (math.isqrt(most - 1) + 1)
        return max(own, self.held.resolution if self.held else 0)

    def within(self, resolution: int) -> BatchShape:
        """With every image that has more tokens than a square of side `resolution` reduced to that square."""
        side = resolution // self.pixels_per_token
        fits = math.prod(self.grid) <= side**2
        small = self if fits else replace(self, width=resolution, height=resolution)
        small = replace(small, references=tuple(g if math.prod(g) <= side**2 else (side, side) for g in self.references))
        return replace(small, held=self.held and self.held.within(resolution))


def largest_batch(sampler: TrainingSampler, pixels_per_token: int, ranks: int = 1) -> BatchShape:
    """The batch with the most tokens that any epoch can have. `ranks`: processes among which a batch is divided."""
    text_rows, order = max(sampler.data.text_rows.values()), sampler.order
    shapes = {crop.shape: (crop.width, crop.height) for crop in sampler.data.crops}
    share = max(1, order.batch_size // ranks)
    trained = [
        BatchShape(min(order.most(shape), share), *size, text_rows, pixels_per_token, None, shape in order.sharing, shape[1:])
        for shape, size in shapes.items()
    ]
    # Held-out batches are not divided among the ranks.
    held = [
        BatchShape(order.batch_size, crop.width, crop.height, text_rows, pixels_per_token, references=crop.shape[1:])
        for crop in sampler.data.held
    ]

    def tokens(batch: BatchShape) -> tuple[int, int]:
        return batch.samples * batch.tokens, batch.width

    shared = any(batch.shared for batch in trained)
    return replace(max(trained, key=tokens), held=max(held, key=tokens, default=None), shared=shared)


class MemoryEstimator:
    """Estimates the bytes that training with given settings needs. No weight is read."""

    def __init__(self, config: TrainConfig, architecture: Architecture, sizes: TransformerConfig) -> None:
        self.config, self.architecture, self.sizes = config, architecture, sizes
        self.dtype: Any = getattr(mx, config.precision)
        packed = {name: (shape, weight_bits(name, architecture, config)) for name, shape in sizes.shapes().items()}
        self.weights = planner.weight_bytes(packed.values(), self.dtype.size)
        inside = [packed[name] for name in packed if architecture.in_block(name)]
        self.unpacked = planner.unpacked_bytes(inside, self.dtype.size)
        self.meta_model = architecture.meta_transformer(sizes, self.dtype)
        self.stored = planner.stored_bytes(self.meta_model.blocks, packed, self.dtype.size) if config.stream_blocks else ()
        # Streamed weights are on disk; the planner counts those that are in memory at once.
        self.weights -= sum(self.stored)
        self.targets = choose_targets(self.meta_model.linears(), config)
        adapter = {t.name + end: mx.zeros(shape) for t in self.targets for end, shape in t.shapes.items()}
        self.adapter = sum(value.nbytes for value in adapter.values())
        optimizer, stacks = build_optimizer(config), Stacks.of(adapter)
        self.update = optimizer.working_bytes(stacks)
        self.state = sum(value.nbytes for value in optimizer.init(stacks).values())

    def estimate(self, batch: BatchShape, samples: int) -> Estimate:
        """The memory for each purpose, in bytes, with `samples` computed at once. `peak(plan)` of the result is the peak
        of the run.
        """
        inputs = self.architecture.zero_inputs(self.sizes, samples, batch.grid, batch.text_rows, batch.references)
        more: dict[str, Any] = {"unpacked": self.unpacked, "stored": self.stored}
        more |= ON_CPU if mx.default_device() == mx.cpu else {}
        more |= self.attention_scores(samples, batch.tokens)
        if batch.held:
            more["validation"] = self.estimate(batch.held, min(batch.held.samples, self.config.measured_at_once)).forward_peak
        # The sum of earlier gradients is live beside a micro-batch's own, until the optimizer takes it over.
        summed = self.adapter if self.sums_gradients(batch, samples) else 0
        kept, update = self.state + summed, self.update - summed
        return planner.estimate(self.meta_model, inputs, self.weights, self.targets, kept, optimizer_work=update, **more)

    def sums_gradients(self, batch: BatchShape, samples: int) -> bool:
        """Whether a step sums several gradients, which takes memory for a second copy of the gradient."""
        several = self.config.accumulate > 1 or batch.shared or samples < batch.samples
        return several or self.config.preservation is not None

    def attention_scores(self, samples: int, tokens: int) -> dict[str, int]:
        """Bytes of one block's scores: the most in use at once, and those kept until the backward pass. Empty if none
        are stored.
        """
        heads = self.sizes.num_attention_heads
        q_BHSK = mx.zeros((samples, heads, tokens, self.sizes.attention_head_dim), self.dtype)
        # These kernels compute attention without storing scores.
        if attention.fused_gradient(q_BHSK) or attention.blocked_gradient(q_BHSK):
            return {}
        whole = samples * heads * tokens * tokens * self.dtype.size
        chunked = attention.chunk_rows(q_BHSK, q_BHSK) < tokens
        return {"scores": min(whole, attention.CHUNK_BYTES), "saved_scores": 0 if chunked else whole}

    def best(self, batch: BatchShape, limit: int, begun: Plan | None = None) -> Candidate:
        """How the largest batch is computed. Needs more than `limit` bytes if nothing fits. `begun`: plan of a resumed run."""
        # What [train] fixes is kept, even if it does not fit.
        config = with_micro_batch(self.config, batch)
        return best_candidate(config, batch.samples, lambda samples: self.estimate(batch, samples), limit, begun)

    def with_config(self, config: TrainConfig) -> MemoryEstimator:
        return MemoryEstimator(config, self.architecture, self.sizes)


def with_micro_batch(config: TrainConfig, batch: BatchShape) -> TrainConfig:
    # macOS ends a program that keeps the display waiting; one sample at a time gives the display more turns.
    alone = kernels.limited() and config.micro_batch is None and batch.resolution >= ALONE
    return replace(config, micro_batch=1) if alone else config


def choose(
    config: TrainConfig,
    family: Family,
    weights: Path,
    sampler: TrainingSampler,
    start: Checkpoint | None,
    say: Callable[[str], None],
) -> MemoryPlan:
    """Choose the plan of a run and tell it with `say`; no weight is loaded. Raises ValueError with settings that would fit."""
    architecture = family.architecture
    estimator = MemoryEstimator(config, architecture, architecture.transformer_config(weights, family))
    batch, limit = largest_batch(sampler, architecture.pixels_per_token, connect().size), memory_budget(config.memory_gb)
    found = require_fit(estimator, batch, limit, start.state.get("plan") if start else None)
    return plan_run(with_micro_batch(config, batch), found, batch.tokens, limit, start, say)


def require_fit(estimator: MemoryEstimator, batch: BatchShape, limit: int, begun: Plan | None = None) -> Candidate:
    """`MemoryEstimator.best`. Raises ValueError with settings that would fit if it needs more than `limit` bytes."""
    found = estimator.best(batch, limit, begun)
    if found.needs > limit:
        raise ValueError(refusal(estimator, batch, found, limit))
    return found


def cheapest_fit(estimator: MemoryEstimator, batch: BatchShape, limit: int) -> Remedy:
    """Changes to [train] with which the batch fits; all changes if they do not suffice."""
    samples = max(batch.samples, batch.held.samples if batch.held else 0)

    def candidate(config: TrainConfig) -> Candidate:
        return estimator.with_config(config).best(batch, limit)

    # The last change to try, since every step then reads the blocks from disk twice.
    last = {} if estimator.config.stream_blocks else {"stream_blocks": True}
    return cheapest_remedy(estimator.config, samples, candidate, limit, last)


def refusal(estimator: MemoryEstimator, batch: BatchShape, candidate: Candidate, limit: int) -> str:
    advice, needs = lower_resolution(estimator, batch, limit)
    would = f"{advice} would need {needs / GB:.3g} GB" if advice else "no setting would need less"
    also = f"{', too much as well' if advice else ''}; choose a smaller family, or train on a device with more memory"
    return (
        f"train: plan {candidate.plan} needs about {candidate.needs / GB:.3g} GB at {batch.width} x {batch.height} px, more than "
        f"the {limit / GB:.3g} GB that training may take: {would}{'' if needs <= limit else also}"
    )


def lower_resolution(estimator: MemoryEstimator, batch: BatchShape, limit: int) -> tuple[str, int]:
    """(settings as text, bytes needed): changes to [train], and a lower resolution if they do not suffice."""
    remedy = cheapest_fit(estimator, batch, limit)
    resolutions = range(batch.resolution - batch.pixels_per_token, LOWEST_RESOLUTION - 1, -batch.pixels_per_token)
    if remedy.needs <= limit or not resolutions:
        return str(remedy), remedy.needs
    changed = estimator.with_config(replace(estimator.config, **remedy.settings))

    def needs(resolution: int) -> int:
        return changed.best(batch.within(resolution), limit).needs

    # Less resolution needs less memory, so the highest one that fits is found by bisection.
    at = bisect_left(resolutions, True, key=lambda resolution: needs(resolution) <= limit)
    highest = resolutions[min(at, len(resolutions) - 1)]
    # The bytes exceed `limit` if even the lowest resolution does not suffice.
    return "; ".join(filter(None, (str(remedy), f"[buckets] resolutions = [{highest}]"))), needs(highest)
