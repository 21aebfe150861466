"""The memory plan of a run on images: estimate bytes from shapes alone, and refuse a run that cannot fit.

The choice among plans and the remedies that suit any training are in `stages.tuner.memory_plan`. Here are the sizes of images,
the shapes of the transformer, and lower resolutions as the last remedy.
"""

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
from stages.models.family import Architecture, Family
from stages.models.protocols import TransformerConfig
from stages.text_to_image.packing import weight_bits
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.train.sampler import TrainingSampler
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
    """The size of a batch, for memory estimates. All images of this batch have the same size. `samples` is the number
    of images. `width` and `height` are the size of each image, in pixels. `text_rows` is the number of rows of each
    text embedding. `pixels_per_token` is the side of an image token in pixels. `held` is another `BatchShape`, that of
    the largest validation batch of the run, or None. `shared` is True if the run may also have batches that mix images
    of several sizes. `references` are the sizes of a sample's reference images, as (height, width) in tokens.

    If a batch mixes several sizes, it is computed size by size, and a `BatchShape` describes the images of one size
    only. Images of one size whose reference images differ in size count as images of different sizes. The attribute
    `held` of a validation batch is None.
    """

    samples: int
    width: int
    height: int
    text_rows: int
    pixels_per_token: int
    held: BatchShape | None = None
    shared: bool = False
    references: tuple[tuple[int, int], ...] = ()  # (height, width) of each reference's latent

    @property
    def grid(self) -> tuple[int, int]:
        """The (height, width) of a latent, in image tokens."""
        return self.height // self.pixels_per_token, self.width // self.pixels_per_token

    @property
    def tokens(self) -> int:
        """The number of tokens of one sample: the tokens of its image and of its reference images, and the rows of its
        text embedding.
        """
        return sum(math.prod(grid) for grid in (self.grid, *self.references)) + self.text_rows

    @property
    def resolution(self) -> int:
        """The resolution of the largest image in the batch, in pixels: the side of a square with as many image tokens,
        rounded up to a multiple of `pixels_per_token`. For example, with 16 pixels per token, an image of 1024 x 256
        has the resolution 512.

        Reference images and the images of the validation batch `held` count too.
        """
        most = max(math.prod(grid) for grid in (self.grid, *self.references))
        own = self.pixels_per_token * (math.isqrt(most - 1) + 1)
        return max(own, self.held.resolution if self.held else 0)

    def within(self, resolution: int) -> BatchShape:
        """Return the batch with its image size limited to `resolution`, the side of a square in pixels. If an image has
        more tokens than this square, its width and height become `resolution`. Otherwise they stay the same. The
        held-out batch `held` is limited in the same way.
        """
        side = resolution // self.pixels_per_token
        fits = math.prod(self.grid) <= side**2
        small = self if fits else replace(self, width=resolution, height=resolution)
        small = replace(small, references=tuple(g if math.prod(g) <= side**2 else (side, side) for g in self.references))
        return replace(small, held=self.held and self.held.within(resolution))


def largest_batch(sampler: TrainingSampler, pixels_per_token: int, ranks: int = 1) -> BatchShape:
    """Return the batch with the most tokens that can occur in any epoch of a run. `sampler` draws the batches of the
    run. `pixels_per_token` is the side of an image token in pixels. With several `ranks` (processes), a batch has only
    the samples that one rank computes.

    The field `held` of the result is the largest batch of held-out images. This batch is not divided among the ranks.
    """
    text_rows, order = max(sampler.data.text_rows.values()), sampler.order
    shapes = {crop.shape: (crop.width, crop.height) for crop in sampler.data.crops}
    share = max(1, order.batch_size // ranks)
    trained = [
        BatchShape(min(order.most(shape), share), *size, text_rows, pixels_per_token, None, shape in order.sharing, shape[1:])
        for shape, size in shapes.items()
    ]
    held = [
        BatchShape(order.batch_size, crop.width, crop.height, text_rows, pixels_per_token, references=crop.shape[1:])
        for crop in sampler.data.held
    ]

    def tokens(batch: BatchShape) -> tuple[int, int]:
        return batch.samples * batch.tokens, batch.width

    shared = any(batch.shared for batch in trained)
    return replace(max(trained, key=tokens), held=max(held, key=tokens, default=None), shared=shared)


class MemoryEstimator:
    """An estimator of the bytes that training with given settings needs. It uses only the shapes of the transformer's weights. No
    weight is read.
    """

    def __init__(self, config: TrainConfig, architecture: Architecture, sizes: TransformerConfig) -> None:
        """Prepare estimates for training with the settings [train] `config`. `architecture` describes the kind of
        transformer. `sizes` holds its dimensions, from `architecture.transformer_config`. No weight is read or
        allocated.
        """
        self.config, self.architecture, self.sizes = config, architecture, sizes
        self.dtype: Any = getattr(mx, config.precision)
        packed = {name: (shape, weight_bits(name, architecture, config)) for name, shape in sizes.shapes().items()}
        self.weights = planner.weight_bytes(packed.values(), self.dtype.size)
        inside = [packed[name] for name in packed if architecture.in_block(name)]
        self.unpacked = planner.unpacked_bytes(inside, self.dtype.size)
        self.meta_model = architecture.meta_transformer(sizes, self.dtype)
        self.stored = planner.stored_bytes(self.meta_model.blocks, packed, self.dtype.size) if config.stream_blocks else ()
        self.weights -= sum(self.stored)
        self.targets = choose_targets(self.meta_model.linears(), config)
        adapter = {t.name + end: mx.zeros(shape) for t in self.targets for end, shape in t.shapes.items()}
        self.adapter = sum(value.nbytes for value in adapter.values())
        optimizer, stacks = build_optimizer(config), Stacks.of(adapter)
        self.update = optimizer.working_bytes(stacks)
        self.state = sum(value.nbytes for value in optimizer.init(stacks).values())

    def estimate(self, batch: BatchShape, samples: int) -> Estimate:
        """Return the estimated memory of training, in bytes for each purpose. `batch` is the largest batch of the run.
        `samples` is the number of samples computed at once. Call `peak(plan)` of the result for the peak of the run.
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
        """Return True if a step sums several gradients, which takes memory for a second copy of the gradient. `batch`
        is the largest batch of the run. `samples` is the number of samples computed at once.

        Gradients are summed if a step has several batches, if a batch mixes image shapes, or if `batch` has more than
        `samples` samples. They are also summed if [train.preservation] adds a loss.
        """
        several = self.config.accumulate > 1 or batch.shared or samples < batch.samples
        return several or self.config.preservation is not None

    def attention_scores(self, samples: int, tokens: int) -> dict[str, int]:
        """Return the bytes of the attention scores of one block, as a dict. "scores" is the largest amount in use at
        once. "saved_scores" is the amount that is kept until the backward pass. `samples` is the number of samples
        computed at once. `tokens` is the number of tokens of one sample, image and text together. If a fused kernel
        computes attention, no scores are stored and the dict is empty.
        """
        heads = self.sizes.num_attention_heads
        q_BHSK = mx.zeros((samples, heads, tokens, self.sizes.attention_head_dim), self.dtype)
        if attention.fused_gradient(q_BHSK) or attention.blocked_gradient(q_BHSK):
            return {}
        whole = samples * heads * tokens * tokens * self.dtype.size
        chunked = attention.chunk_rows(q_BHSK, q_BHSK) < tokens
        return {"scores": min(whole, attention.CHUNK_BYTES), "saved_scores": 0 if chunked else whole}

    def best(self, batch: BatchShape, limit: int, begun: Plan | None = None) -> Candidate:
        """Choose how the largest batch of a run is computed, and return the choice as a `Candidate`. `batch` is the
        shape of the largest batch. `limit` is the memory in bytes that the run may take. The result says how many
        samples are computed at once (`samples`), and how many blocks keep their activations (`plan`). `begun` is the
        plan of a resumed run, or None. If [train] `memory` is "auto" and `begun` fits into `limit`, `begun` is chosen
        again. If nothing fits, the result needs more than `limit` bytes.

        Values that [train] fixes are kept, even if they do not fit. If `memory` is "auto" and `begun` is not chosen,
        the fastest plan that fits is chosen. If [train] `micro_batch` is "auto", the number of samples is halved until
        the plan "blocks" fits.
        """
        config = with_micro_batch(self.config, batch)
        return best_candidate(config, batch.samples, lambda samples: self.estimate(batch, samples), limit, begun)

    def with_config(self, config: TrainConfig) -> MemoryEstimator:
        """Return an estimator for this transformer with the settings `config`."""
        return MemoryEstimator(config, self.architecture, self.sizes)


def with_micro_batch(config: TrainConfig, batch: BatchShape) -> TrainConfig:
    """Return the settings [train] `config`, with `micro_batch` chosen for this device. `micro_batch` is the number of
    samples computed at once. `batch` is the largest batch of the run. `micro_batch` becomes 1 if it is None, the device
    is a GPU that uses Metal, and `batch` has a resolution of at least 768 px. Otherwise, `config` is returned
    unchanged.

    macOS ends a program that keeps the display waiting. One sample at a time gives the display more turns.
    """
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
    """Choose the memory plan of a run, print it with `say`, and return it. The plan says how many samples are computed
    at once, and how many blocks (layers) keep their activations. `config` holds the settings [train]. `family` is the
    model family. `weights` is the folder of the transformer. No weight is loaded. `sampler` gives the batches of the
    run. `start` is the checkpoint to continue from, or None for a new run. Raises ValueError if no plan fits into
    memory. The message names settings that would fit.
    """
    architecture = family.architecture
    estimator = MemoryEstimator(config, architecture, architecture.transformer_config(weights, family))
    batch, limit = largest_batch(sampler, architecture.pixels_per_token, connect().size), memory_budget(config.memory_gb)
    found = require_fit(estimator, batch, limit, start.state.get("plan") if start else None)
    return plan_run(with_micro_batch(config, batch), found, batch.tokens, limit, start, say)


def require_fit(estimator: MemoryEstimator, batch: BatchShape, limit: int, begun: Plan | None = None) -> Candidate:
    """Choose how to compute the largest batch of a run, `batch`, with at most `limit` bytes. `estimator` estimates the
    memory for given settings. The result says how many samples are computed at once (`samples`) and how many blocks
    (layers) keep their activations (`plan`). `begun` is the plan of a resumed run, or None. It is kept if it fits and
    [train] `memory` is "auto". Raises ValueError if nothing fits. The message names settings that would fit.
    """
    found = estimator.best(batch, limit, begun)
    if found.needs > limit:
        raise ValueError(refusal(estimator, batch, found, limit))
    return found


def cheapest_fit(estimator: MemoryEstimator, batch: BatchShape, limit: int) -> Remedy:
    """Find changes to the settings [train] with which a run fits into memory, and return them as a `Remedy`.
    `estimator` estimates the memory with the present settings. `batch` is the largest batch of the run. `limit` is the
    memory limit in bytes. The result has the changes (`settings`), the memory plan (`plan`) and the peak memory in
    bytes (`needs`). If all changes together do not suffice, `settings` has all of them.

    Changes are made one by one until the run fits. Those that prove unnecessary are then undone.
    """
    samples = max(batch.samples, batch.held.samples if batch.held else 0)

    def candidate(config: TrainConfig) -> Candidate:
        return estimator.with_config(config).best(batch, limit)

    last = {} if estimator.config.stream_blocks else {"stream_blocks": True}
    return cheapest_remedy(estimator.config, samples, candidate, limit, last)


def refusal(estimator: MemoryEstimator, batch: BatchShape, candidate: Candidate, limit: int) -> str:
    """Return the one-line error message for a run that needs more than `limit` bytes of memory. `estimator` estimates
    the memory with the present settings. `batch` is the largest batch of the run. `candidate` is the best way found to
    compute it, with its memory. The message gives this memory, and settings that would fit. A lower resolution is
    proposed only if other settings do not suffice.
    """
    advice, needs = lower_resolution(estimator, batch, limit)
    would = f"{advice} would need {needs / GB:.3g} GB" if advice else "no setting would need less"
    also = f"{', too much as well' if advice else ''}; choose a smaller family, or train on a device with more memory"
    return (
        f"train: plan {candidate.plan} needs about {candidate.needs / GB:.3g} GB at {batch.width} x {batch.height} px, more than "
        f"the {limit / GB:.3g} GB that training may take: {would}{'' if needs <= limit else also}"
    )


def lower_resolution(estimator: MemoryEstimator, batch: BatchShape, limit: int) -> tuple[str, int]:
    """Return (settings, bytes): new settings with which training fits into `limit` bytes, and the memory that training
    then needs. The settings are text, or "" if none has to change. `estimator` estimates the memory with the present
    settings. `batch` is the largest batch of the run. Settings of [train] are changed first. If this does not suffice,
    the resolution is reduced too.

    If even the lowest resolution does not suffice, the text still has all changes. The bytes then exceed `limit`.
    """
    remedy = cheapest_fit(estimator, batch, limit)
    resolutions = range(batch.resolution - batch.pixels_per_token, LOWEST_RESOLUTION - 1, -batch.pixels_per_token)
    if remedy.needs <= limit or not resolutions:
        return str(remedy), remedy.needs
    changed = estimator.with_config(replace(estimator.config, **remedy.settings))

    def needs(resolution: int) -> int:
        return changed.best(batch.within(resolution), limit).needs

    at = bisect_left(resolutions, True, key=lambda resolution: needs(resolution) <= limit)
    highest = resolutions[min(at, len(resolutions) - 1)]
    return "; ".join(filter(None, (str(remedy), f"[buckets] resolutions = [{highest}]"))), needs(highest)
