"""Read micro-batches: the latents, embeddings and masks of samples, copied from disk into host memory.

Letters in names: B batch, C latent channels, H W latent height and width, L = H W image tokens, T text rows, J text features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from schemas.text_to_image.latents import LATENTS
from stages.stage import StageContext, TensorReader
from stages.text_to_image.stored_embeddings import embedding_reader
from stages.text_to_image.train.sampler import Sample, TrainingSampler


@dataclass
class MicroBatch:
    """Training samples that are computed at once. The arrays are in host memory and have one entry per sample.
    `x0_BCHW` are clean latents (batch, channels, height, width). `ctx_BTJ` are text embeddings (batch, text rows,
    features). Both are bfloat16 as uint16 words. `noise_BCHW` is float32 noise.

    `mask_BL` is the float32 weight of each image token, or None if no sample has a mask. `class_BTJ` are embeddings of
    the class captions. A sample without a class caption has its own caption there. `class_B` is 1.0 for samples with a
    class caption, else 0.0. If no sample has a class caption, `class_BTJ` and `class_B` are None. `references` has the
    clean latents of each reference, in the form of `x0_BCHW` at a size of its own.
    """

    samples: list[Sample]
    x0_BCHW: np.ndarray  # noqa: N815
    noise_BCHW: np.ndarray  # noqa: N815  (float32)
    ctx_BTJ: np.ndarray  # noqa: N815
    mask_BL: np.ndarray | None = None  # noqa: N815
    class_BTJ: np.ndarray | None = None  # noqa: N815
    class_B: np.ndarray | None = None  # noqa: N815
    references: tuple[np.ndarray, ...] = ()

    @property
    def tokens(self) -> int:
        """The number of tokens of one sample: image tokens, tokens of references and text rows."""
        latents = (self.x0_BCHW, *self.references)
        return int(sum(each.shape[2] * each.shape[3] for each in latents) + self.ctx_BTJ.shape[1])

    def select(self, start: int, stop: int) -> MicroBatch:
        """Return a new micro-batch with the samples from index `start` up to, but not including, index `stop`."""
        beside = tuple(latents_BCHW[start:stop] for latents_BCHW in self.references)
        own = {name: value[start:stop] for name, value in vars(self).items() if value is not None and name != "references"}
        return replace(self, **own, references=beside)


class BatchReader:
    """A reader that copies the micro-batches of a run from the tables `latents` and `embeddings` into host memory."""

    def __init__(self, ctx: StageContext, sampler: TrainingSampler, mask_floor: float) -> None:
        """Open the tables `latents` and `embeddings` of the run `ctx`. `sampler` draws the noise of the samples.
        `mask_floor` is the smallest weight of an image token outside a mask, from 0 to 1.
        """
        self.latents, self.embeddings = ctx.tensors(LATENTS), embedding_reader(ctx)
        self.sampler, self.mask_floor = sampler, mask_floor

    def prefetch(self, samples: Iterable[Sample]) -> None:
        """Start to read the latents and text embeddings of `samples` from disk in the background. They are the samples of the
        next step.
        """
        coming = list(samples)
        beside = [each.latent_id for s in coming for each in s.crop.references]
        self.latents.ahead([*(s.crop.latent_id for s in coming), *beside])
        self.embeddings.ahead([caption for s in coming for caption in (s.caption_id, s.class_id) if caption])

    def read(self, step: int, samples: list[Sample]) -> MicroBatch:
        """Read the latents and text embeddings of `samples` and return them as one micro-batch. The noise of a sample
        depends on the seed, the step and the sample. `step` is the training step of these samples, counted from 1.
        """
        noise = functools.partial(self.sampler.noise_of, step)
        return read_batch(samples, self.latents, self.embeddings, noise, self.mask_floor)


def read_batch(
    samples: list[Sample],
    latents: TensorReader,
    embeddings: TensorReader,
    noise: Callable[[Sample, tuple[int, ...]], np.ndarray],
    mask_floor: float,
) -> MicroBatch:
    """Read the latents and embeddings of `samples` and return them as one micro-batch. `noise(sample, shape)` returns
    the float32 noise of a sample. A mask gives each image token a weight, from 0 where the mask is black to 1 where it
    is white. `mask_floor`, from 0 to 1, replaces every smaller weight.
    """
    x0_BCHW = np.stack([latents.read(s.crop.latent_id) for s in samples])
    noise_BCHW = np.stack([noise(s, x0_BCHW.shape[1:]) for s in samples])
    ctx_BTJ = np.stack([embeddings.read(s.caption_id) for s in samples])
    batch = MicroBatch(samples, x0_BCHW, noise_BCHW, ctx_BTJ, token_weights(samples, mask_floor))
    shown = zip(*(s.crop.references for s in samples), strict=True)  # for each place among the references, that of each sample
    batch.references = tuple(np.stack([latents.read(each.latent_id) for each in of_samples]) for of_samples in shown)
    if any(s.class_id for s in samples):
        batch.class_BTJ = np.stack([embeddings.read(s.class_id or s.caption_id) for s in samples])
        batch.class_B = np.array([bool(s.class_id) for s in samples], np.float32)
    return batch


def token_weights(samples: Sequence[Sample], floor: float) -> np.ndarray | None:
    """Return the weight of each image token: a float32 array (batch, tokens) with values from `floor` to 1. The weights come from
    the samples' masks. If no sample has a mask, the result is None.
    """
    if not any(s.crop.mask for s in samples):
        return None
    masks = [np.frombuffer(s.crop.mask or b"\xff" * s.crop.tokens, np.uint8) for s in samples]
    return np.maximum(np.stack(masks).astype(np.float32) / 255, np.float32(floor))
