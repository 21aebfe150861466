"""The held-out images that a run is measured by: the same crops, noise levels and noise at every measurement."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from schemas.text_to_image.latents import LATENTS
from stages.run import Run
from stages.text_to_image.stored_embeddings import embedding_reader
from stages.text_to_image.train.dataset import Crop
from stages.text_to_image.train.reader import MicroBatch, read_batch
from stages.text_to_image.train.sampler import Sample
from stages.text_to_image.train.selection import ValidationConfig
from stages.tuner import draws


class HeldOutImages:
    """Every held-out crop at every level of [train.validation] sigmas, with its first caption and the same noise each time."""

    def __init__(
        self, run: Run[Any], crops: Sequence[Crop], config: ValidationConfig, batch_size: int, mask_floor: float = 0.0
    ) -> None:
        self.run, self.crops, self.config, self.mask_floor = run, crops, config, mask_floor
        self.batches = level_batches([crop.shape for crop in crops], config.sigmas, batch_size)

    @property
    def count(self) -> int:
        return len(self.crops) * len(self.config.sigmas)

    def samples(self) -> list[list[Sample]]:
        drawn = [(self.crops[row], float(np.float32(sigma))) for batch in self.batches for row, sigma in batch]
        samples = iter([Sample(n, 0, crop, crop.captions[0], False, sigma) for n, (crop, sigma) in enumerate(drawn)])
        return [[next(samples) for _ in batch] for batch in self.batches]

    def micro_batches(self) -> Iterator[MicroBatch]:
        # Opened separately from the training's readers, which release memory at another pace.
        latents, embeddings = self.run.inputs.tensors(LATENTS), embedding_reader(self.run)
        for samples in self.samples():
            yield read_batch(samples, latents, embeddings, self.noise_of, self.mask_floor)

    def noise_of(self, sample: Sample, shape: tuple[int, ...]) -> np.ndarray:
        """Depends on the validation seed and the crop alone, so it is equal at every noise level."""
        return crop_noise(shape, self.config.seed, sample.crop.latent_id)


def level_batches(shapes: Sequence[Hashable], sigmas: Sequence[float], batch_size: int) -> list[list[tuple[int, float]]]:
    """Batches of at most `batch_size` pairs (crop index, sigma); all crops of a batch have one shape."""
    by_shape: dict[Hashable, list[tuple[int, float]]] = {}
    for row, shape in enumerate(shapes):
        by_shape.setdefault(shape, []).extend((row, sigma) for sigma in sigmas)
    return [pairs[n : n + batch_size] for pairs in by_shape.values() for n in range(0, len(pairs), batch_size)]


def crop_noise(shape: tuple[int, ...], seed: int, latent_id: str) -> np.ndarray:
    return draws.normal(shape, seed, f"validation {latent_id}")
