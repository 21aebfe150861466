"""Which rows a run trains on, how often, and which are held out to measure it: settings, and functions of them.

A rate is how often a crop comes per epoch: 1 without settings.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Literal

from stages.settings import selects, setting
from stages.tuner import draws

LEAST, MOST = 1e-3, 1e3  # of a rate that is given: an epoch is a list in memory, and has at least one crop


@dataclass(frozen=True)
class DataConfig:
    """[train.data]: how often which crops are drawn, and what a dropped caption becomes."""

    resolutions: Mapping[str, float] | None = setting(
        None, "how often a crop of each resolution is drawn, beside the others: {512 = 2, 768 = 1}; 0: never; unset: all alike"
    )
    repeats: Mapping[str, float] | None = setting(
        None, 'how often per epoch the images of a folder come: {"rare" = 3, "blurred" = 0}; of several the longest; others once'
    )
    dropped: Literal["empty", "trigger"] = setting(
        "empty", "what a dropped caption becomes; trigger: the word alone, for a subject that should need no other"
    )

    def __post_init__(self) -> None:
        for name in ("resolutions", "repeats"):
            for key, value in (getattr(self, name) or {}).items():
                if value and not LEAST <= value <= MOST:
                    raise ValueError(f"{name}: {value:g} of {key!r} is wrong; 0, or {LEAST:g} to {MOST:g}, is wanted")
        for key in self.resolutions or {}:
            if not key.isdecimal():
                raise ValueError(f"resolutions: {key!r} is no resolution; one of [buckets] resolutions is wanted, like 512")
        if self.resolutions is not None and not any(self.resolutions.values()):
            raise ValueError("resolutions: none is above 0, which leaves nothing to train on")


@dataclass(frozen=True)
class MaskConfig:
    """[train.mask]: train where the masks in `latents` are white. To be had with [latents] mask = "alpha" or "file"."""

    floor: float = setting(0.1, "the least weight of a token, where the mask is black: a little keeps the surroundings whole")

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor: {self.floor} is wrong; 0 to 1 is wanted")


@dataclass(frozen=True)
class ValidationConfig:
    """[train.validation]: images that are never trained on, measured every so often with the same noise at the same levels."""

    share: float = setting(0.1, "share of the images that is held out, at least one; which, is a matter of their content alone")
    most: int = setting(16, "images held out at the most, however many there are: each costs a pass per level and crop")
    paths: tuple[str, ...] = setting((), 'hold out these images instead, by wildcards on their paths: "held/*", "*_val.png"')
    every: int = setting(100, "steps between two measurements; the first is before the first step")
    sigmas: tuple[float, ...] = setting((0.1, 0.3, 0.5, 0.7, 0.9), "the noise levels: fixed, so that losses can be compared")
    seed: int = setting(0, "of the choice of images and of their noise")
    patience: int | None = selects(None, "end the run after so many measurements in a row without a better one; unset: never")
    min_delta: float = selects(0.0, "by how much the mean loss must fall to count as better")

    def __post_init__(self) -> None:
        for name, low, high in (("share", 0, 1), ("most", 1, math.inf), ("every", 1, math.inf), ("min_delta", 0, math.inf)):
            if not low <= getattr(self, name) <= high:
                raise ValueError(
                    f"{name}: {getattr(self, name)} is wrong; {low} " + ("to 1" if high == 1 else "or more") + " is wanted"
                )
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"patience: {self.patience} is wrong; 1 or more, or leave it out to never end early")
        if not self.sigmas or not all(0 < sigma <= 1 for sigma in self.sigmas) or len(set(self.sigmas)) < len(self.sigmas):
            raise ValueError(f"sigmas: {list(self.sigmas)} should be different levels above 0, up to 1, like [0.1, 0.5, 0.9]")


def rates(config: DataConfig, crops: Sequence[tuple[int, str]]) -> list[float]:
    """The rate of each crop, given its resolution and its image's path. ValueError for a setting that names nothing there is."""
    weights = _weights(config, {resolution for resolution, _ in crops})
    folders = {folder.strip("/").removeprefix("./"): count for folder, count in (config.repeats or {}).items()}
    for given, folder in zip(config.repeats or {}, folders, strict=True):
        if not any(_below(path, folder) for _, path in crops):
            near = _near(folder, {str(above) for _, path in crops for above in PurePosixPath(path).parents})
            raise ValueError(f"[train.data] repeats: {given!r} is the path of no image that is trained on{near}")
    longest = sorted(folders, key=len, reverse=True)
    times = [next((folders[f] for f in longest if _below(path, f)), 1.0) for _, path in crops]
    found = [weights[resolution] * count for (resolution, _), count in zip(crops, times, strict=True)]
    most = max(found, default=0.0)
    return [rate / most for rate in found] if 0 < most < 1 else found  # or there would be epochs without a crop


def _weights(config: DataConfig, there: Iterable[int]) -> dict[int, float]:
    """The weight of each resolution: that of the heaviest is 1."""
    resolutions = sorted(there)
    if config.resolutions is None:
        return dict.fromkeys(resolutions, 1.0)
    given = {int(name): float(weight) for name, weight in config.resolutions.items()}
    named = ", ".join(map(str, resolutions))
    for resolution in given:
        if resolution not in resolutions:
            raise ValueError(f"[train.data] resolutions: no crop has {resolution}; there are {named}")
    for resolution in resolutions:
        if resolution not in given:
            raise ValueError(f"[train.data] resolutions: {resolution} has no weight; 0 leaves it out; there are {named}")
    return {resolution: given[resolution] / max(given.values()) for resolution in resolutions}


def held_out(config: ValidationConfig, names: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """Which images, by image_id, are held out, of those with these paths. ValueError if the paths asked for name none.

    An image is held out or not whatever other images there are, but for the bounds: at least one, and `most`.
    """
    if config.paths:
        found = {i for i, paths in names.items() if any(fnmatchcase(path, p) for path in paths for p in config.paths)}
        if not found:
            raise ValueError(f"[train.validation] paths: {list(config.paths)} matches none of the {len(names)} images")
        return frozenset(found)
    drawn = sorted((draws.uniform(config.seed, f"held out {image_id}"), image_id) for image_id in names)
    below = [image_id for u, image_id in drawn if u < config.share][: config.most]
    return frozenset(below or [image_id for _, image_id in drawn[:1]])


def _below(path: str, folder: str) -> bool:
    return PurePosixPath(path).is_relative_to(folder)


def _near(word: str, words: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, sorted(words), 1, 0.5)
    return f'; did you mean "{found[0]}"?' if found else ""
