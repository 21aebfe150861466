"""The samples of each step, determined by (seed, step, sample); held-out images; micro-batches, read into host memory.

Letters in names: B batch, C latent channels, H W latent height and width, L = H W image tokens, T text rows, J text features.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stages.run import Run
from stages.text_to_image.stored_embeddings import embedding_reader
from stages.text_to_image.train.config import TrainConfig, ValidationConfig
from stages.text_to_image.train.data import Crop, Dataset, latent_reader
from stages.tuner import draws
from stages.tuner.diffusion import SigmaDistribution, stratified_uniform
from stages.tuner.order import Order


@dataclass(frozen=True)
class Sample:
    number: int  # 0-based place in the step
    epoch: int  # of the sample's batch, from 0
    crop: Crop
    caption_id: str
    dropped: bool  # `caption_id` is the empty caption, or the trigger word alone
    sigma: float  # noise level, from 0 (clean) to 1 (noise)
    class_id: str = ""  # the class caption: the class word replaces the trigger; "" if the step needs none, or none exists
    strength: float = 1.0  # of the adapter; of a slider, 1 and -1 in turns
    step: int = 0  # from 1; 0: held out


@dataclass(frozen=True)
class TrainingSampler:
    """Samplers with equal attributes draw the same samples in the same step."""

    data: Dataset
    seed: int
    order: Order  # which crops form each batch
    noise: SigmaDistribution
    caption_dropout: float  # probability that a sample gets the caption `data.empty`
    strata: int = 1  # steps in a row that cover the noise levels evenly
    classes_every: int = 0  # class captions are used in every n-th step; 0: never
    reference_dropout: float = 0.0  # share of batches that are trained without their references
    text_rows: Callable[[int], int] = int  # of `Architecture`

    def step(self, step: int) -> list[list[Sample]]:
        """The samples of a step: one list per batch, or one per shape if a batch mixes shapes."""
        batches: list[list[Sample]] = []
        number = 0
        for at, batch in enumerate(self.order.step(step)):
            drawn: dict[Hashable, list[Sample]] = {}  # by strength and the rows of their texts
            # Drawn for all samples together, since they share one shape, references included.
            alone = draws.uniform(self.seed, "references", step, at) < self.reference_dropout
            for row in batch.rows:
                crop = self.data.crops[row]
                sample = self._sample(step, number, batch.epoch, replace(crop, references=()) if alone else crop)
                drawn.setdefault(self._alike(sample), []).append(sample)
                number += 1
            batches += drawn.values()
        # A batch that was divided has another order.
        places = iter(range(number))
        return [[replace(sample, number=next(places)) for sample in samples] for samples in batches]

    def _alike(self, sample: Sample) -> Hashable:
        # The reader puts the caption where a class caption is missing.
        read = sample.caption_id, sample.class_id or sample.caption_id, *sample.crop.poles
        return sample.strength, *(self.text_rows(self.data.text_rows[each]) for each in read)

    def _sample(self, step: int, number: int, epoch: int, crop: Crop) -> Sample:
        dropped = draws.uniform(self.seed, "dropout", step, number) < self.caption_dropout
        if crop.weights:
            at = draws.weighted_choice(crop.weights, self.seed, "caption", step, number)
        else:
            at = draws.choice(len(crop.captions), self.seed, "caption", step, number)
        sigma = self.noise.sigma(stratified_uniform(self.seed, step, number, self.strata), crop.tokens)
        replaced = crop.dropped or self.data.empty, self.data.empty_class
        caption, its_class = replaced if dropped else (crop.captions[at], crop.class_of(at))
        needs_class = self.classes_every and step % self.classes_every == 0
        strength = -1.0 if crop.poles and (step + number) % 2 else crop.strength
        return Sample(number, epoch, crop, caption, dropped, sigma, its_class if needs_class else "", strength, step)

    def noise_of(self, step: int, sample: Sample, shape: tuple[int, ...]) -> np.ndarray:
        """float32; depends on seed, step and the sample's number alone."""
        return draws.normal(shape, self.seed, "noise", step, sample.number)


def build_sampler(config: TrainConfig, data: Dataset, text_rows: Callable[[int], int] = int) -> TrainingSampler:
    n = config.noise
    scale = {} if n.scale is None else {"scale": n.scale}
    return TrainingSampler(
        data,
        config.seed,
        Order([crop.shape for crop in data.crops], config.batch_size, config.seed, config.accumulate, data.rates),
        SigmaDistribution(n.base, n.mean, n.std, n.shift, n.shift_factor, **scale),
        config.caption_dropout,
        n.strata,
        config.preservation.every if config.preservation else 0,
        config.data.reference_dropout,
        text_rows,
    )


Texts = tuple[np.ndarray, np.ndarray | None]  # text embeddings (B, T, J), and the rows of each; None: all are equally long


@dataclass
class MicroBatch:
    """Samples that are computed at once; the arrays are in host memory, one entry per sample."""

    samples: list[Sample]
    x0_BCHW: np.ndarray  # noqa: N815  (clean latents, bfloat16 as uint16)
    noise_BCHW: np.ndarray  # noqa: N815  (float32)
    ctx_BTJ: np.ndarray  # noqa: N815  (text embeddings, bfloat16 as uint16, levelled to the longest)
    tokens_B: np.ndarray | None = None  # noqa: N815  (rows of each text embedding; None: all are equally long)
    mask_BL: np.ndarray | None = None  # noqa: N815  (float32 weight of each token; None: no sample has a mask)
    class_BTJ: np.ndarray | None = None  # noqa: N815  (embeddings of class captions; None: no sample has one)
    class_tokens_B: np.ndarray | None = None  # noqa: N815  (as tokens_B)
    class_B: np.ndarray | None = None  # noqa: N815  (1.0: the sample has a class caption; else 0.0)
    references: tuple[np.ndarray, ...] = ()  # clean latents of each reference, as x0_BCHW at a size of its own
    poles: tuple[Texts, ...] = ()  # of a slider: of the positive and the negative prompts

    @property
    def tokens(self) -> int:
        """Of one sample: its image, its references and its text."""
        latents = (self.x0_BCHW, *self.references)
        return int(sum(each.shape[2] * each.shape[3] for each in latents) + self.ctx_BTJ.shape[1])

    def select(self, start: int, stop: int) -> MicroBatch:
        beside = tuple(latents_BCHW[start:stop] for latents_BCHW in self.references)
        poles = tuple((words_BTJ[start:stop], None if rows_B is None else rows_B[start:stop]) for words_BTJ, rows_B in self.poles)
        alone = ("references", "poles")
        own = {name: value[start:stop] for name, value in vars(self).items() if value is not None and name not in alone}
        return replace(self, **own, references=beside, poles=poles)


class BatchReader:
    def __init__(self, run: Run[Any], mask_floor: float, noise: Callable[[int, Sample, tuple[int, ...]], np.ndarray]) -> None:
        """`noise(step, sample, shape)`: float32. `mask_floor`: replaces every smaller weight of a token."""
        self.latents, self.embeddings = latent_reader(run), embedding_reader(run)
        self.mask_floor, self.noise = mask_floor, noise

    def prefetch(self, samples: Iterable[Sample]) -> None:
        coming = list(samples)
        beside = [each.latent_id for s in coming for each in s.crop.references]
        self.latents.ahead([*(s.crop.latent_id for s in coming), *beside])
        self.embeddings.ahead([caption for s in coming for caption in (s.caption_id, s.class_id, *s.crop.poles) if caption])

    def read(self, step: int, samples: list[Sample]) -> MicroBatch:
        latents, embeddings = self.latents, self.embeddings
        x0_BCHW = np.stack([latents.read(s.crop.latent_id) for s in samples])
        noise_BCHW = np.stack([self.noise(step, s, x0_BCHW.shape[1:]) for s in samples])
        texts = levelled([embeddings.read(s.caption_id) for s in samples])
        batch = MicroBatch(samples, x0_BCHW, noise_BCHW, *texts, token_weights(samples, self.mask_floor))
        shown = zip(*(s.crop.references for s in samples), strict=True)  # by place among the references, that of each sample
        batch.references = tuple(np.stack([latents.read(each.latent_id) for each in of_samples]) for of_samples in shown)
        places = zip(*(s.crop.poles for s in samples), strict=True)
        batch.poles = tuple(levelled([embeddings.read(each) for each in of_samples]) for of_samples in places)
        if any(s.class_id for s in samples):
            # A sample without a class caption has its own caption here, and weight 0.
            texts = levelled([embeddings.read(s.class_id or s.caption_id) for s in samples])
            batch.class_BTJ, batch.class_tokens_B = texts
            batch.class_B = np.array([bool(s.class_id) for s in samples], np.float32)
        return batch


def levelled(texts: Sequence[np.ndarray]) -> Texts:
    """Embeddings (T, J) as one array, the last row of the shorter ones repeated, and the rows of each; None if all are equal."""
    rows = [len(text) for text in texts]
    if len(set(rows)) == 1:
        return np.stack(texts), None
    return np.stack([np.pad(text, [(0, max(rows) - len(text)), (0, 0)], "edge") for text in texts]), np.array(rows, np.int32)


def token_weights(samples: Sequence[Sample], floor: float) -> np.ndarray | None:
    """float32 (batch, tokens), from `floor` to 1; None if no sample has a mask."""
    if not any(s.crop.mask for s in samples):
        return None
    # A crop without a mask counts in full.
    masks = [np.frombuffer(s.crop.mask or b"\xff" * s.crop.tokens, np.uint8) for s in samples]
    return np.maximum(np.stack(masks).astype(np.float32) / 255, np.float32(floor))


class HeldOutImages:
    """Every held-out crop at every level of [train.validation] sigmas, with its first caption and the same noise each time."""

    def __init__(self, run: Run[Any], data: Dataset, config: ValidationConfig, batch_size: int, mask_floor: float = 0.0) -> None:
        self.run, self.crops, self.config, self.mask_floor = run, data.held, config, mask_floor
        text_rows = run.needs["family"].architecture.text_rows
        shapes = [(crop.shape, text_rows(data.text_rows[crop.captions[0]])) for crop in data.held]
        self.batches = level_batches(shapes, config.sigmas, batch_size)

    @property
    def count(self) -> int:
        return len(self.crops) * len(self.config.sigmas)

    def samples(self) -> list[list[Sample]]:
        drawn = [(self.crops[row], float(np.float32(sigma))) for batch in self.batches for row, sigma in batch]
        samples = iter([Sample(n, 0, crop, crop.captions[0], False, sigma) for n, (crop, sigma) in enumerate(drawn)])
        return [[next(samples) for _ in batch] for batch in self.batches]

    def micro_batches(self) -> Iterator[MicroBatch]:
        # Opened separately from the training's readers, which release memory at another pace.
        reader = BatchReader(self.run, self.mask_floor, self.noise_of)
        for samples in self.samples():
            yield reader.read(0, samples)

    def noise_of(self, step: int, sample: Sample, shape: tuple[int, ...]) -> np.ndarray:
        """Depends on the validation seed and the crop alone, so it is equal at every noise level and step."""
        return draws.normal(shape, self.config.seed, f"validation {sample.crop.latent_id}")


def level_batches(shapes: Sequence[Hashable], sigmas: Sequence[float], batch_size: int) -> list[list[tuple[int, float]]]:
    """Batches of at most `batch_size` pairs (crop index, sigma); all crops of a batch have one of `shapes`."""
    by_shape: dict[Hashable, list[tuple[int, float]]] = {}
    for row, shape in enumerate(shapes):
        by_shape.setdefault(shape, []).extend((row, sigma) for sigma in sigmas)
    return [pairs[n : n + batch_size] for pairs in by_shape.values() for n in range(0, len(pairs), batch_size)]
