"""What each step of a run draws of the rows that it trains on, and reading it ahead of the device.

B batch, C latent channels, H W latent height and width, L = H W image tokens, T text rows, J text features.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from schemas.text_to_image.embeddings import EMBEDDINGS
from schemas.text_to_image.latents import LATENTS
from stages.stage import StageContext, TensorReader
from stages.text_to_image.train.dataset import Crop, Data
from stages.tuner import draws
from stages.tuner.diffusion.noise import SigmaDistribution, stratified_uniform
from stages.tuner.order import Order


@dataclass(frozen=True)
class Sample:
    """One sample of a step, before anything is read."""

    number: int  # 0-based place in the step
    epoch: int
    crop: Crop
    caption_id: str
    dropped: bool
    sigma: float
    class_id: str = ""  # its caption with the class word in the trigger's place; "" where there is none, or none is asked for


@dataclass(frozen=True)
class TrainingSampler:
    """What every step draws, as a function of the seed and the step."""

    data: Data
    seed: int
    order: Order
    noise: SigmaDistribution
    caption_dropout: float
    strata: int = 1  # of the noise levels
    classes_every: int = 0  # at every so many steps samples have their class captions too; 0: never
    mask_floor: float = 0.0  # the least weight of a token

    def sizes(self, step: int) -> list[int]:
        """How many samples each micro-batch of a step has."""
        return [len(batch.rows) for batch in self.order.step(step)]

    def step(self, step: int) -> list[list[Sample]]:
        """What a step trains on, micro-batch by micro-batch."""
        micros: list[list[Sample]] = []
        number = 0
        for batch in self.order.step(step):
            micros.append([])
            for row in batch.rows:
                micros[-1].append(self.sample(step, number, batch.epoch, self.data.crops[row]))
                number += 1
        return micros

    def sample(self, step: int, number: int, epoch: int, crop: Crop) -> Sample:
        """One sample's draws."""
        dropped = draws.uniform(self.seed, "dropout", step, number) < self.caption_dropout
        at = draws.choice(len(crop.captions), self.seed, "caption", step, number)
        sigma = self.noise.sigma(stratified_uniform(self.seed, step, number, self.strata), crop.tokens)
        text, made = (self.data.empty, self.data.empty_class) if dropped else (crop.captions[at], crop.class_of(at))
        asked = self.classes_every and step % self.classes_every == 0
        return Sample(number, epoch, crop, text, dropped, sigma, made if asked else "")

    def noise_of(self, step: int, sample: Sample, shape: tuple[int, ...]) -> np.ndarray:
        """The noise of one sample."""
        return draws.normal(shape, self.seed, "noise", step, sample.number)


@dataclass
class MicroBatch:
    """One micro-batch in host memory; latents and embeddings are 16-bit words, bfloat16."""

    samples: list[Sample]
    x0_BCHW: np.ndarray  # noqa: N815
    noise_BCHW: np.ndarray  # noqa: N815
    ctx_BTJ: np.ndarray  # noqa: N815
    mask_BL: np.ndarray | None = None  # noqa: N815  (float32; None where no sample has a mask)
    class_BTJ: np.ndarray | None = None  # noqa: N815  (of samples without a class caption their own; None where all are)
    class_B: np.ndarray | None = None  # noqa: N815  (float32: 1 where there is a class caption, else 0)

    @property
    def held(self) -> list[bool]:
        """Of each sample, whether it comes with a class caption, by which it is held to the base."""
        return [False] * len(self.samples) if self.class_B is None else [bool(one) for one in self.class_B]

    def part(self, start: int, stop: int) -> MicroBatch:
        """The samples start .. stop - 1 alone."""
        arrays = {name: value[start:stop] for name, value in vars(self).items() if value is not None}
        return replace(self, **arrays)


def read(
    samples: list[Sample],
    latents: TensorReader,
    embeddings: TensorReader,
    noise: Callable[[Sample, tuple[int, ...]], np.ndarray],
    mask_floor: float,
) -> MicroBatch:
    """Copy the rows of one micro-batch."""
    x0_BCHW = np.stack([latents.read(s.crop.latent_id) for s in samples])
    noise_BCHW = np.stack([noise(s, x0_BCHW.shape[1:]) for s in samples])
    ctx_BTJ = np.stack([embeddings.read(s.caption_id) for s in samples])
    made = MicroBatch(samples, x0_BCHW, noise_BCHW, ctx_BTJ, mask_of(samples, mask_floor))
    if any(s.class_id for s in samples):
        made.class_BTJ = np.stack([embeddings.read(s.class_id or s.caption_id) for s in samples])
        made.class_B = np.array([bool(s.class_id) for s in samples], np.float32)
    return made


def mask_of(samples: Sequence[Sample], floor: float) -> np.ndarray | None:
    """The weight of each token, (B,L) float32, floor .. 1; None where no sample has a mask."""
    if not any(s.crop.mask for s in samples):
        return None
    masks = [np.frombuffer(s.crop.mask or b"\xff" * s.crop.tokens, np.uint8) for s in samples]
    return np.maximum(np.stack(masks).astype(np.float32) / 255, np.float32(floor))


class Loader:
    """Steps read and drawn ahead in a thread, while the device computes: iterates (step, micro-batches, seconds waited)."""

    def __init__(self, ctx: StageContext, sampler: TrainingSampler, steps: range) -> None:
        self.latents, self.embeddings = ctx.tensors(LATENTS), ctx.tensors(EMBEDDINGS)
        self.sampler, self.steps = sampler, steps

    def __iter__(self) -> Iterator[tuple[int, list[MicroBatch], float]]:
        self.ask(self.steps.start)
        with ThreadPoolExecutor(1, "feed") as pool:
            coming = pool.submit(self.load, self.steps.start)
            for step in self.steps:
                began = time.perf_counter()
                micros = coming.result()
                waited = time.perf_counter() - began
                if step + 1 in self.steps:
                    coming = pool.submit(self.load, step + 1)
                yield step, micros, waited

    def load(self, step: int) -> list[MicroBatch]:
        """Copy a step's rows and draw its noise; then ask for the pages of the step after it."""
        noise = functools.partial(self.sampler.noise_of, step)
        floor = self.sampler.mask_floor
        micros = [read(samples, self.latents, self.embeddings, noise, floor) for samples in self.sampler.step(step)]
        if step + 1 in self.steps:
            self.ask(step + 1)
        return micros

    def ask(self, step: int) -> None:
        """Let the readers know what a step reads; what was read before is copied by now."""
        samples = [s for micro in self.sampler.step(step) for s in micro]
        self.latents.ahead([s.crop.latent_id for s in samples])
        self.embeddings.ahead([caption for s in samples for caption in (s.caption_id, s.class_id) if caption])
