"""How a batch is read: latents, embeddings and masks of its samples, copied from disk into host memory.

Letters in names: B batch, C latent channels, H W latent height and width, L = H W image tokens, T text rows, J text features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from schemas.text_to_image.embeddings import EMBEDDINGS
from schemas.text_to_image.latents import LATENTS
from stages.stage import StageContext, TensorReader
from stages.text_to_image.train.sampler import Sample, TrainingSampler


@dataclass
class MicroBatch:
    """Samples in host memory. Latents and embeddings are bfloat16, as 16-bit words. `mask_BL` weighs each token, float32; None if
    no sample has a mask. `class_BTJ` are embeddings of the class captions, and of samples without one the own caption's;
    `class_B` is 1.0 for samples with a class caption, else 0.0; both None if none has one.
    """

    samples: list[Sample]
    x0_BCHW: np.ndarray  # noqa: N815
    noise_BCHW: np.ndarray  # noqa: N815  (float32)
    ctx_BTJ: np.ndarray  # noqa: N815
    mask_BL: np.ndarray | None = None  # noqa: N815
    class_BTJ: np.ndarray | None = None  # noqa: N815
    class_B: np.ndarray | None = None  # noqa: N815

    @property
    def tokens(self) -> int:
        """Tokens of one sample: image tokens and text rows."""
        return int(self.x0_BCHW.shape[2] * self.x0_BCHW.shape[3] + self.ctx_BTJ.shape[1])

    def select(self, start: int, stop: int) -> MicroBatch:
        """Return the samples start .. stop - 1 as a micro-batch of their own."""
        return replace(self, **{name: value[start:stop] for name, value in vars(self).items() if value is not None})


class BatchReader:
    """Reads the micro-batches of a run from the tables latents and embeddings."""

    def __init__(self, ctx: StageContext, sampler: TrainingSampler, mask_floor: float) -> None:
        """`mask_floor` is the least weight of a token, 0 to 1."""
        self.latents, self.embeddings = ctx.tensors(LATENTS), ctx.tensors(EMBEDDINGS)
        self.sampler, self.mask_floor = sampler, mask_floor

    def prefetch(self, samples: Iterable[Sample]) -> None:
        """Announce the samples of the next step to both tables."""
        coming = list(samples)
        self.latents.ahead([s.crop.latent_id for s in coming])
        self.embeddings.ahead([caption for s in coming for caption in (s.caption_id, s.class_id) if caption])

    def read(self, step: int, samples: list[Sample]) -> MicroBatch:
        """Read one micro-batch of a step, and draw its noise."""
        noise = functools.partial(self.sampler.noise_of, step)
        return read_batch(samples, self.latents, self.embeddings, noise, self.mask_floor)


def read_batch(
    samples: list[Sample],
    latents: TensorReader,
    embeddings: TensorReader,
    noise: Callable[[Sample, tuple[int, ...]], np.ndarray],
    mask_floor: float,
) -> MicroBatch:
    """Copy the rows of one micro-batch. `noise(sample, shape)` draws the noise of one sample, float32."""
    x0_BCHW = np.stack([latents.read(s.crop.latent_id) for s in samples])
    noise_BCHW = np.stack([noise(s, x0_BCHW.shape[1:]) for s in samples])
    ctx_BTJ = np.stack([embeddings.read(s.caption_id) for s in samples])
    batch = MicroBatch(samples, x0_BCHW, noise_BCHW, ctx_BTJ, token_weights(samples, mask_floor))
    if any(s.class_id for s in samples):
        batch.class_BTJ = np.stack([embeddings.read(s.class_id or s.caption_id) for s in samples])
        batch.class_B = np.array([bool(s.class_id) for s in samples], np.float32)
    return batch


def token_weights(samples: Sequence[Sample], floor: float) -> np.ndarray | None:
    """Return the masks of samples as token weights: (batch, tokens) float32, floor .. 1. None if no sample has a mask."""
    if not any(s.crop.mask for s in samples):
        return None
    masks = [np.frombuffer(s.crop.mask or b"\xff" * s.crop.tokens, np.uint8) for s in samples]
    return np.maximum(np.stack(masks).astype(np.float32) / 255, np.float32(floor))
