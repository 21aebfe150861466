"""The memory that training on images takes, from shapes alone. `stages.tuner.memory` decides what is made of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from schemas.text_to_image import IMAGES
from stages import kernels
from stages.memory import FLUX2_ON_CPU, Forecast, Outlook, Settings, changed
from stages.models import attention
from stages.models.family import Architecture, TransformerConfig
from stages.text_to_image.length import AUTO
from stages.text_to_image.memory import largest_image, smaller_sides, text_rows
from stages.text_to_image.train.batches import TrainingSampler
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.weights import weight_bits
from stages.tuner import memory
from stages.tuner.memory import Blocks, Estimator, trace
from stages.tuner.step import build_optimizer, choose_targets

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


class ImageEstimator(Estimator[TrainConfig]):
    def __init__(self, config: TrainConfig, architecture: Architecture, sizes: TransformerConfig, batch: BatchShape) -> None:
        self.architecture, self.sizes, self.batch = architecture, sizes, batch
        self.samples, self.tokens, self.of = batch.samples, batch.tokens, f"at {batch.width} x {batch.height} px"
        self.most = max(batch.samples, batch.held.samples if batch.held else 0)
        model = architecture.meta_transformer(sizes, getattr(mx, config.precision))
        shapes = {name: (shape, weight_bits(name, architecture, config)) for name, shape in sizes.shapes().items()}
        inside, targets = filter(architecture.in_block, shapes), choose_targets(model.linears(), config)
        super().__init__(config, model, shapes, inside, targets, build_optimizer(config), config.stream_blocks)

    @property
    def micro_batch(self) -> Any:
        # macOS ends a program that keeps the display waiting; one sample at a time gives the display more turns.
        alone = kernels.limited() and self.config.micro_batch is None and self.batch.resolution >= ALONE
        return 1 if alone else self.config.micro_batch

    def blocks(self, samples: int) -> Blocks:
        batch, c = self.batch, self.config
        held = batch.held and self._trace(batch.held, min(batch.held.samples, c.measured_at_once)).forward_work
        # The sum of earlier gradients is live beside a micro-batch's own, until the optimizer takes it over: a step that sums
        # several has a second copy of the gradient.
        several = c.accumulate > 1 or batch.shared or samples < batch.samples or bool(c.preservation or c.slider)
        return self._trace(batch, samples, self.adapter if several else 0, held or 0)

    def _trace(self, batch: BatchShape, samples: int, summed: int = 0, validation: int = 0) -> Blocks:
        parts = self.frozen | (FLUX2_ON_CPU if mx.default_device() == mx.cpu else {})
        return trace(
            self.model,
            self.architecture.zero_inputs(self.sizes, samples, batch.grid, batch.text_rows, batch.references),
            self.targets,
            optimizer_state=self.state + summed,
            optimizer_work=self.update - summed,
            validation=validation,
            **parts | self._attention_scores(samples, batch.tokens),
        )

    def _attention_scores(self, samples: int, tokens: int) -> dict[str, int]:
        """Of one block: the most in use at once, and those kept until the backward pass. Empty if none are stored."""
        heads = self.sizes.num_attention_heads
        q_BHSK = mx.zeros((samples, heads, tokens, self.sizes.attention_head_dim), self.dtype)
        # These kernels compute attention without storing scores.
        if attention.fused_gradient(q_BHSK) or attention.blocked_gradient(q_BHSK):
            return {}
        whole = samples * heads * tokens * tokens * self.dtype.size
        chunked = attention.chunk_rows(q_BHSK, q_BHSK) < tokens
        return {"scores": min(whole, attention.CHUNK_BYTES), "saved_scores": 0 if chunked else whole}

    def changed(self, settings: Settings) -> ImageEstimator:
        """`settings` of [train]; resolutions of [buckets] reduce the images."""
        sides = settings.get("buckets", {}).get("resolutions")
        batch = self.batch.within(max(sides)) if sides else self.batch
        return ImageEstimator(changed(self.config, settings.get("train", {})), self.architecture, self.sizes, batch)

    def cheaper(self) -> Iterator[Settings]:
        yield from super().cheaper()
        if not self.config.stream_blocks:  # the last to try, since every step then reads the blocks from disk twice
            yield {"train": {"stream_blocks": True}}

    def smaller(self) -> Iterator[Settings]:
        for side in smaller_sides(self.batch.resolution, self.batch.pixels_per_token):
            yield {"buckets": {"resolutions": [side]}}


def forecast(outlook: Outlook) -> Forecast:
    """Before the run's data is there; `largest_batch` then has the true sizes."""
    config: TrainConfig = outlook.sections["train"]
    known = outlook.rows(IMAGES)
    used = [] if known is None else [row for row in known.to_pylist() if row["rejected"] is None and row["use"] is None]
    unknown = config.steps == AUTO and not used
    config = config.settled(len(used))
    family, architecture = outlook.family, outlook.family.architecture
    width, height = largest_image(outlook)
    batch = BatchShape(config.batch_size, width, height, text_rows(outlook), architecture.pixels_per_token)
    shown = max((row["reference"] or 0 for row in known.to_pylist()), default=0) if known is not None else 0
    batch = replace(batch, references=(batch.grid,) * shown)  # none is larger than the largest image
    read = family if shown else family.without_references()
    sizes = architecture.transformer_config(outlook.weights("transformer"), read)
    estimator = ImageEstimator(config, architecture, sizes, batch)
    how = f", {config.base_bits} bits, {width} x {height} px"
    found = memory.forecast(estimator, outlook.budget, how, files=sum(estimator.frozen["stored"]))
    return replace(found, size=(width, height), rows=None if unknown else found.rows)
