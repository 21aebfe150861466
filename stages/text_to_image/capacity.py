"""What a machine with a given memory can train: families, sizes of images, and the settings with which every stage fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from stages.forecast import Forecast, Outlook
from stages.models.family import Family
from stages.text_to_image import PIPELINE
from stages.text_to_image.families import FAMILIES
from stages.tuner.quantize import BITS

SIDES = (512, 768, 1024)  # pixels


@dataclass(frozen=True)
class Capacity:
    """What fits into memory for one model family and image size. `family` is the family's name. `side` is the width and
    height of the images in pixels. `bits` is the largest number of bits per weight with which every stage fits. `plan`
    says which blocks keep their activations in training, such as "whole" (all). `peak` is the memory of the largest
    stage in bytes. `streamed` is True if the model's blocks must stay on disk. If nothing fits, `bits` is None.
    """

    family: str
    side: int
    bits: int | None = None
    plan: str = ""
    peak: int = 0
    streamed: bool = False

    def __str__(self) -> str:
        """Return the result as text, such as "16 bits, whole, 17.7 GB". The parts are the bits per weight, "streamed" if
        the blocks stay on disk, the memory plan and the peak memory. The text is "does not fit" if `bits` is None.
        """
        streamed = " streamed" if self.streamed else ""
        return f"{self.bits} bits{streamed}, {self.plan}, {self.peak / 1e9:.3g} GB" if self.bits else "does not fit"


def capacities(budget: int) -> Iterator[Capacity]:
    """Yield what fits into `budget` bytes of memory, as one `Capacity` per model family and image size in `SIDES`. Each
    gives the most bits per weight that fit. Families without published weights are left out. Distilled families
    (trained to sample in few steps) are left out too.
    """
    for family in FAMILIES.values():
        if family.hub and not family.distilled:
            yield from (capacity(family, side, budget) for side in SIDES)


def capacity(family: Family, side: int, budget: int) -> Capacity:
    """Return the largest number of bits per weight with which every stage fits into memory. `family` is the model
    family. `side` is the width and height of the images in pixels. `budget` is the available memory in bytes. In the
    result, `bits` is None if nothing fits.

    The blocks of the model stay on disk only if even the smallest number of bits does not fit otherwise.
    """
    for bits, streamed in (*((bits, False) for bits in BITS), (BITS[-1], True)):
        found = forecasts(family, side, bits, budget, streamed)
        peak = max(forecast.peak for forecast in found.values())
        if peak <= budget:
            plan = found["train"].plan.split(",")[0].removeprefix("plan ")
            plan = plan if plan in ("whole", "blocks") else f"{plan} blocks kept"
            return Capacity(family.name, side, bits, plan, peak, streamed)
    return Capacity(family.name, side)


def forecasts(family: Family, side: int, bits: int, budget: int, streamed: bool = False) -> dict[str, Forecast]:
    """Return the memory forecast of each stage, as a dict from the stage's name to a `Forecast`. `family` is the record
    of the model family. `side` is the width and height of the images in pixels. `bits` is the number of bits per weight
    of the base model. `budget` is the available memory in bytes. If `streamed` is True, the blocks (layers) of the base
    model stay on disk. All other settings have their defaults.

    Below 16 bits, the optimizer is 8-bit AdamW. A stage is left out if the model family lacks a component that the
    stage needs.
    """
    sections: dict[str, Any] = {name: PIPELINE.stage(name).config() for name in PIPELINE.stages}
    train = sections["train"]
    method = replace(train.optimizer, kind="adamw8bit") if bits < 16 else train.optimizer
    sections["buckets"] = replace(sections["buckets"], resolutions=(side,))
    sections["samples"] = replace(sections["samples"], width=side, height=side, base_bits=bits, stream_blocks=streamed)
    sections["train"] = replace(train, base_bits=bits, optimizer=method, stream_blocks=streamed)
    outlook = Outlook(sections, family, budget)
    found = {}
    for name in PIPELINE.stages:
        stage = PIPELINE.stage(name)
        if stage.forecast and not any(need in family.unsupported for need in stage.needs):
            found[name] = stage.forecast(outlook)
    return found


def lines(budget: int) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a table for the user: what fits into `budget` bytes of memory. Each row is a tuple of texts.
    The first row is the heading, with one column per image size in `SIDES`. Each further row has the name of a model
    family, and a text such as "16 bits, whole, 17.7 GB" per size.
    """
    yield "family", *(f"{side} px" for side in SIDES)
    found = list(capacities(budget))
    for name in dict.fromkeys(each.family for each in found):
        yield name, *(str(each) for each in found if each.family == name)
