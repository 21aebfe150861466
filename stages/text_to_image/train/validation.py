"""The held-out images that a run is measured by: the same crops, noise levels and noise at every measurement."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from schemas.text_to_image.embeddings import EMBEDDINGS
from schemas.text_to_image.latents import LATENTS
from stages.stage import StageContext
from stages.text_to_image.train.dataset import Crop
from stages.text_to_image.train.reader import MicroBatch, read_batch
from stages.text_to_image.train.sampler import Sample
from stages.text_to_image.train.selection import ValidationConfig
from stages.tuner import draws


class HeldOutImages:
    """Every held-out crop with its first caption, at every noise level of [train.validation] sigmas."""

    def __init__(
        self, ctx: StageContext, crops: Sequence[Crop], config: ValidationConfig, batch_size: int, mask_floor: float = 0.0
    ) -> None:
        """`batch_size`: samples computed together. `mask_floor`: the least weight of a token, 0 to 1."""
        self.ctx, self.crops, self.config, self.mask_floor = ctx, crops, config, mask_floor
        self.batches = level_batches([crop.grid for crop in crops], config.sigmas, batch_size)

    @property
    def count(self) -> int:
        """Samples of one measurement."""
        return len(self.crops) * len(self.config.sigmas)

    def samples(self) -> list[list[Sample]]:
        """The samples of one measurement, micro-batch by micro-batch."""
        drawn = [(self.crops[row], float(np.float32(sigma))) for batch in self.batches for row, sigma in batch]
        samples = iter([Sample(n, 0, crop, crop.captions[0], False, sigma) for n, (crop, sigma) in enumerate(drawn)])
        return [[next(samples) for _ in batch] for batch in self.batches]

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Read the samples of one measurement, by readers of its own: those of training release pages at their own pace."""
        latents, embeddings = self.ctx.tensors(LATENTS), self.ctx.tensors(EMBEDDINGS)
        for samples in self.samples():
            yield read_batch(samples, latents, embeddings, self.noise_of, self.mask_floor)

    def noise_of(self, sample: Sample, shape: tuple[int, ...]) -> np.ndarray:
        """Return the noise of a sample's crop, float32: the same at every level, whatever other crops there are."""
        return crop_noise(shape, self.config.seed, sample.crop.latent_id)


def level_batches(shapes: Sequence[Hashable], sigmas: Sequence[float], batch_size: int) -> list[list[tuple[int, float]]]:
    """Return each crop at each noise level, as batches of (index of the crop, sigma) with one shape each."""
    by_shape: dict[Hashable, list[tuple[int, float]]] = {}
    for row, shape in enumerate(shapes):
        by_shape.setdefault(shape, []).extend((row, sigma) for sigma in sigmas)
    return [pairs[n : n + batch_size] for pairs in by_shape.values() for n in range(0, len(pairs), batch_size)]


def crop_noise(shape: tuple[int, ...], seed: int, latent_id: str) -> np.ndarray:
    """Draw the validation noise of one crop: a float32 array of that shape, a function of the seed and the latent's id."""
    return draws.normal(shape, seed, f"validation {latent_id}")
