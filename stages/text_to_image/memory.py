"""Sizes of the images that stages will meet, for their forecasts; and what a machine with a given memory can train."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow.compute as pc

from schemas.text_to_image import BUCKETS, CAPTIONS, EMBEDDINGS
from stages.memory import Forecast, Outlook
from stages.models.family import Family
from stages.text_to_image import PIPELINE
from stages.text_to_image.families import FAMILIES

LOWEST = 256  # pixels: no smaller image is advised
LONG = 160  # tokens of a long caption, where none is known yet
TOKEN_BYTES, CHAT_TOKENS = 3, 10  # at least, of UTF-8 text a token (about 4.5 in English); at most, of an empty prompt
SIDES = (512, 768, 1024)  # pixels
OPTIMIZER = "adamw8bit"  # with a packed base


def image_sizes(outlook: Outlook) -> list[tuple[int, int]]:
    """(width, height) of every crop; without the table `buckets`, a square per resolution."""
    if outlook.sections["train"].slider:
        return [(outlook.sections["drawings"].width, outlook.sections["drawings"].height)]
    rows = outlook.rows(BUCKETS)
    if rows is None or not rows.num_rows:
        return [(side, side) for side in outlook.sections["buckets"].resolutions]
    kept = [row for row in rows.to_pylist() if row["rejected"] is None]
    return [(row["width"], row["height"]) for row in kept] or [(0, 0)]


def largest_image(outlook: Outlook) -> tuple[int, int]:
    return max(image_sizes(outlook), key=lambda size: (size[0] * size[1], size))


def caption_rows(outlook: Outlook) -> list[int]:
    """Rows of the embedding of every distinct caption, guessed from its length until it is encoded. [LONG] without captions."""
    family: Family = outlook.family
    if family.text_padding in ("start", "end"):
        return [family.text_tokens]
    encoded = outlook.rows(EMBEDDINGS)
    if encoded is not None and encoded.num_rows:
        return [row["shape"][0] for row in encoded.to_pylist()]
    captions = outlook.rows(CAPTIONS)
    texts = [] if captions is None else pc.unique(captions["text"]).to_pylist()
    guessed = [len(text.encode()) // TOKEN_BYTES + CHAT_TOKENS for text in texts] or [LONG]
    return [min(rows, family.text_tokens) for rows in guessed]


def text_rows(outlook: Outlook) -> int:
    """The most rows that the transformer reads for a caption."""
    rows: int = outlook.family.architecture.text_rows(max(caption_rows(outlook)))
    return rows


def smaller_sides(side: float, step: int) -> range:
    return range(int(side) // step * step - step, LOWEST - 1, -step)


# What fits


@dataclass(frozen=True)
class Capacity:
    family: str
    side: int  # pixels
    bits: int | None = None  # per weight; None: nothing fits
    plan: str | int | None = None  # of training
    peak: int = 0  # bytes, of the largest stage
    streamed: bool = False  # blocks stay on disk

    def __str__(self) -> str:
        plan = f"{self.plan} blocks kept" if isinstance(self.plan, int) else self.plan
        streamed = " streamed" if self.streamed else ""
        return f"{self.bits} bits{streamed}, {plan}, {self.peak / 1e9:.3g} GB" if self.bits else "does not fit"


def capacities(budget: int) -> Iterator[Capacity]:
    for family in FAMILIES.values():
        if family.hub and not family.base:
            yield from (capacity(family, side, budget) for side in SIDES)


def capacity(family: Family, side: int, budget: int) -> Capacity:
    """The most bits per weight with which every stage fits into `budget` bytes."""
    from stages.tuner.weights import BITS

    # Streamed only if even the fewest bits do not fit otherwise.
    for bits, streamed in (*((bits, False) for bits in BITS), (BITS[-1], True)):
        found = forecasts(family, side, bits, budget, streamed)
        peak = max(forecast.peak for forecast in found.values())
        if peak <= budget:
            return Capacity(family.name, side, bits, found["train"].plan, peak, streamed)
    return Capacity(family.name, side)


def forecasts(family: Family, side: int, bits: int, budget: int, streamed: bool = False) -> dict[str, Forecast]:
    """Of each stage, for images of `side` pixels; all other settings at their defaults."""
    sections: dict[str, Any] = {name: PIPELINE.stage(name).config() for name in PIPELINE.stages}
    train = sections["train"]
    # Who packs the base to save memory saves it in the optimizer too.
    method = replace(train.optimizer, kind=OPTIMIZER) if bits < 16 else train.optimizer
    sections["buckets"] = replace(sections["buckets"], resolutions=(side,))
    sections["samples"] = replace(sections["samples"], width=side, height=side, base_bits=bits, stream_blocks=streamed)
    sections["train"] = replace(train, base_bits=bits, optimizer=method, stream_blocks=streamed)
    outlook, found = Outlook(sections, family, budget), {}
    for name in PIPELINE.stages:
        stage = PIPELINE.stage(name)
        # A stage whose component the family lacks does not run.
        runs = not any(need in family.unsupported for need in stage.needs)
        if runs and stage.forecast and (forecast := stage.forecast(outlook)):
            found[name] = forecast
    return found


def lines(budget: int) -> Iterator[tuple[str, ...]]:
    yield "family", *(f"{side} px" for side in SIDES)
    found = list(capacities(budget))
    for name in dict.fromkeys(each.family for each in found):
        yield name, *(str(each) for each in found if each.family == name)
