"""What a run trains on: which rows of the tables, what each step draws of them, and reading it ahead of the device.

B batch, C latent channels, H W latent height and width, T text rows, J text features.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from schemas.buckets import BUCKETS
from schemas.captions import CAPTIONS
from schemas.embeddings import EMBEDDINGS
from schemas.images import IMAGES
from schemas.latents import LATENTS
from stages.stage import StageContext
from stages.tuner import draws
from stages.tuner.batches import Order
from stages.tuner.noise import Noise

Row = dict[str, Any]
PLACE = ("image_id", "width", "height", "crop_x", "crop_y", "crop_w", "crop_h")  # what a bucket and its latents share


@dataclass(frozen=True)
class Crop:
    """One latent that may be trained on, with the captions of its image."""

    latent_id: str
    image_id: str
    width: int
    height: int
    captions: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Image tokens: one per 16 x 16 pixels."""
        return self.width // 16 * (self.height // 16)


@dataclass(frozen=True)
class Data:
    """All that a run trains on, in an order that depends on content alone."""

    crops: tuple[Crop, ...]
    empty: str  # the empty caption's id; "" where no caption is ever dropped
    text_rows: dict[str, int]  # rows of each caption's embedding


def usable(ctx: StageContext) -> Data:
    """The crops that the current buckets name, encoded and captioned. ValueError if there is none or a table lacks some."""
    images = {row["image_id"] for row in ctx.rows(IMAGES).to_pylist() if row["rejected"] is None}
    buckets = [row for row in ctx.rows(BUCKETS).to_pylist() if row["rejected"] is None]
    places = {_place(row) for row in buckets if row["image_id"] in images}
    latents = [row for row in ctx.rows(LATENTS).to_pylist() if _place(row) in places]
    lost = len(places - {_place(row) for row in latents})
    if lost:
        raise ValueError(f"train: {lost} of {len(places)} crops have no latent; run the stage latents")
    captions, empty = _captions(ctx)
    encoded = [row for row in latents if row["rejected"] is None]
    used = sorted((row for row in encoded if row["image_id"] in captions), key=lambda row: str(row["latent_id"]))
    if not used:
        raise ValueError(
            f"train: there is nothing to train on: of {len(places)} crops {len(latents) - len(encoded)} could not be encoded "
            f"and {len(encoded)} have no caption; see the tables buckets, latents and captions"
        )
    text_rows = {row["caption_id"]: row["shape"][0] for row in ctx.rows(EMBEDDINGS).to_pylist()}
    crops = tuple(Crop(r["latent_id"], r["image_id"], r["width"], r["height"], captions[r["image_id"]]) for r in used)
    read = {caption for crop in crops for caption in crop.captions} | ({empty} if empty else set())
    if read - set(text_rows):
        raise ValueError(
            f"train: {len(read - set(text_rows))} of {len(read)} captions have no embedding; run the stage embeddings"
        )
    return Data(crops, empty, text_rows)


def _place(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in PLACE)


def _captions(ctx: StageContext) -> tuple[dict[str, tuple[str, ...]], str]:
    """The captions of each image in their order, and the empty caption where some are to be dropped."""
    found: dict[str, list[str]] = {}
    empty = ""
    for row in sorted(ctx.rows(CAPTIONS).to_pylist(), key=lambda row: (row["position"], row["caption_id"])):
        if row["role"] == "caption":
            found.setdefault(row["image_id"], []).append(row["caption_id"])
        elif row["role"] == "empty":
            empty = row["caption_id"]
    if not ctx.config.caption_dropout:
        empty = ""
    elif not empty:
        raise ValueError("train: caption_dropout needs the empty caption, of which captions has no row; run the stage captions")
    return {image: tuple(ids) for image, ids in found.items()}, empty


@dataclass(frozen=True)
class Sample:
    """One sample of a step, before anything is read."""

    number: int  # 0-based place in the step
    epoch: int
    crop: Crop
    caption_id: str
    dropped: bool
    sigma: float


@dataclass(frozen=True)
class Course:
    """What every step draws, as a function of the seed and the step."""

    data: Data
    seed: int
    order: Order
    noise: Noise
    caption_dropout: float

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
        caption = crop.captions[draws.choice(len(crop.captions), self.seed, "caption", step, number)]
        sigma = self.noise.draw(draws.generator(self.seed, "sigma", step, number), crop.tokens)
        return Sample(number, epoch, crop, self.data.empty if dropped else caption, dropped, sigma)


@dataclass
class Micro:
    """One micro-batch in host memory; latents and embeddings are 16-bit words, bfloat16."""

    samples: list[Sample]
    x0_BCHW: np.ndarray  # noqa: N815
    noise_BCHW: np.ndarray  # noqa: N815
    ctx_BTJ: np.ndarray  # noqa: N815


class Feed:
    """Steps read and drawn ahead in a thread, while the device computes: iterates (step, micro-batches, seconds waited)."""

    def __init__(self, ctx: StageContext, course: Course, steps: range) -> None:
        self.latents, self.embeddings = ctx.tensors(LATENTS), ctx.tensors(EMBEDDINGS)
        self.course, self.steps = course, steps

    def __iter__(self) -> Iterator[tuple[int, list[Micro], float]]:
        self.ask(self.course.step(self.steps.start))
        with ThreadPoolExecutor(1, "feed") as pool:
            coming = pool.submit(self.load, self.steps.start)
            for step in self.steps:
                began = time.perf_counter()
                micros = coming.result()
                waited = time.perf_counter() - began
                if step + 1 in self.steps:
                    coming = pool.submit(self.load, step + 1)
                yield step, micros, waited

    def load(self, step: int) -> list[Micro]:
        """Copy a step's rows and draw its noise; then ask for the pages of the step after it."""
        micros = []
        for samples in self.course.step(step):
            x0_BCHW = np.stack([self.latents.read(s.crop.latent_id) for s in samples])
            ctx_BTJ = np.stack([self.embeddings.read(s.caption_id) for s in samples])
            noise = [draws.normal(x0_BCHW.shape[1:], self.course.seed, "noise", step, s.number) for s in samples]
            micros.append(Micro(samples, x0_BCHW, np.stack(noise), ctx_BTJ))
        if step + 1 in self.steps:
            self.ask(self.course.step(step + 1))
        return micros

    def ask(self, micros: list[list[Sample]]) -> None:
        """Let the readers know what comes next; what was read before is copied by now."""
        self.latents.ahead([s.crop.latent_id for micro in micros for s in micro])
        self.embeddings.ahead([s.caption_id for micro in micros for s in micro])
