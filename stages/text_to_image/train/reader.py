"""Read micro-batches: the latents, embeddings and masks of samples, copied from disk into host memory.

Letters in names: B batch, C latent channels, H W latent height and width, L = H W image tokens, T text rows, J text features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from schemas.text_to_image.latents import LATENTS
from stages.run import Run, TensorReader
from stages.text_to_image.stored_embeddings import embedding_reader
from stages.text_to_image.train.sampler import Sample, TrainingSampler


@dataclass
class MicroBatch:
    """Samples that are computed at once; the arrays are in host memory, one entry per sample."""

    samples: list[Sample]
    x0_BCHW: np.ndarray  # noqa: N815  (clean latents, bfloat16 as uint16)
    noise_BCHW: np.ndarray  # noqa: N815  (float32)
    ctx_BTJ: np.ndarray  # noqa: N815  (text embeddings, bfloat16 as uint16)
    mask_BL: np.ndarray | None = None  # noqa: N815  (float32 weight of each token; None: no sample has a mask)
    class_BTJ: np.ndarray | None = None  # noqa: N815  (embeddings of class captions; None: no sample has one)
    class_B: np.ndarray | None = None  # noqa: N815  (1.0: the sample has a class caption; else 0.0)
    references: tuple[np.ndarray, ...] = ()  # clean latents of each reference, as x0_BCHW at a size of its own

    @property
    def tokens(self) -> int:
        """Of one sample: its image, its references and its text."""
        latents = (self.x0_BCHW, *self.references)
        return int(sum(each.shape[2] * each.shape[3] for each in latents) + self.ctx_BTJ.shape[1])

    def select(self, start: int, stop: int) -> MicroBatch:
        beside = tuple(latents_BCHW[start:stop] for latents_BCHW in self.references)
        own = {name: value[start:stop] for name, value in vars(self).items() if value is not None and name != "references"}
        return replace(self, **own, references=beside)


class BatchReader:
    def __init__(self, run: Run[Any], sampler: TrainingSampler, mask_floor: float) -> None:
        self.latents, self.embeddings = run.inputs.tensors(LATENTS), embedding_reader(run)
        self.sampler, self.mask_floor = sampler, mask_floor

    def prefetch(self, samples: Iterable[Sample]) -> None:
        """Start reading the samples of the next step in the background."""
        coming = list(samples)
        beside = [each.latent_id for s in coming for each in s.crop.references]
        self.latents.ahead([*(s.crop.latent_id for s in coming), *beside])
        self.embeddings.ahead([caption for s in coming for caption in (s.caption_id, s.class_id) if caption])

    def read(self, step: int, samples: list[Sample]) -> MicroBatch:
        noise = functools.partial(self.sampler.noise_of, step)
        return read_batch(samples, self.latents, self.embeddings, noise, self.mask_floor)


def read_batch(
    samples: list[Sample],
    latents: TensorReader,
    embeddings: TensorReader,
    noise: Callable[[Sample, tuple[int, ...]], np.ndarray],
    mask_floor: float,
) -> MicroBatch:
    """`noise(sample, shape)`: the float32 noise. `mask_floor`: replaces every smaller weight of a token."""
    x0_BCHW = np.stack([latents.read(s.crop.latent_id) for s in samples])
    noise_BCHW = np.stack([noise(s, x0_BCHW.shape[1:]) for s in samples])
    ctx_BTJ = np.stack([embeddings.read(s.caption_id) for s in samples])
    batch = MicroBatch(samples, x0_BCHW, noise_BCHW, ctx_BTJ, token_weights(samples, mask_floor))
    shown = zip(*(s.crop.references for s in samples), strict=True)  # for each place among the references, that of each sample
    batch.references = tuple(np.stack([latents.read(each.latent_id) for each in of_samples]) for of_samples in shown)
    if any(s.class_id for s in samples):
        # A sample without a class caption has its own caption here, and weight 0.
        batch.class_BTJ = np.stack([embeddings.read(s.class_id or s.caption_id) for s in samples])
        batch.class_B = np.array([bool(s.class_id) for s in samples], np.float32)
    return batch


def token_weights(samples: Sequence[Sample], floor: float) -> np.ndarray | None:
    """float32 (batch, tokens), from `floor` to 1; None if no sample has a mask."""
    if not any(s.crop.mask for s in samples):
        return None
    # A crop without a mask counts in full.
    masks = [np.frombuffer(s.crop.mask or b"\xff" * s.crop.tokens, np.uint8) for s in samples]
    return np.maximum(np.stack(masks).astype(np.float32) / 255, np.float32(floor))
