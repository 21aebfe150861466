"""How often a run trains on which rows (rate: occurrences per epoch, 1 without settings), and which images are held out."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Literal

from stages.settings import SEEDS, check_bounds, setting
from stages.tuner import config as tuner
from stages.tuner import draws

LEAST, MOST = 1e-3, 1e3  # of a rate in a setting: an epoch is a list in memory, and has at least one crop


@dataclass(frozen=True)
class DataConfig:
    resolutions: Mapping[str, float] | None = setting(
        None,
        "how often a crop of each resolution is drawn, relative to the others: {512 = 2, 768 = 1}; 0: never; unset: equally",
        bounds=(0.0, MOST),
    )
    repeats: Mapping[str, float] | None = setting(
        None,
        'how often per epoch the images of a folder occur: {"rare" = 3, "blurred" = 0}; the longest path that matches; others 1',
        bounds=(0.0, MOST),
    )
    # With 0.5, one regularisation image is drawn for every two images of the subject.
    regularisation: float = setting(
        1.0,
        "draws of regularisation images (folder reg) per draw of another image; kohya: 1; 0: never",
        bounds=(0.0, MOST),
        unrecorded=(1.0,),
    )
    reference_dropout: float = setting(
        0.0,
        "share of batches trained without their references; 0: the model always sees what it edits",
        bounds=(0.0, 1.0),
        unrecorded=(0.0,),
    )
    dropped: Literal["empty", "trigger"] = setting(
        "empty", "what a dropped caption becomes; trigger: the trigger word alone, for a subject that should need no other"
    )

    def __post_init__(self) -> None:
        for name in ("resolutions", "repeats"):
            for key, value in (getattr(self, name) or {}).items():
                if value and not LEAST <= value <= MOST:
                    raise ValueError(f"{name} must be 0, or {LEAST:g} to {MOST:g}, got {value:g} for {key!r}")
        for key in self.resolutions or {}:
            if not key.isdecimal():
                raise ValueError(f"resolutions must name values of [buckets] resolutions, such as 512, got {key!r}")
        if self.resolutions is not None and not any(self.resolutions.values()):
            raise ValueError("resolutions must have a value above 0; with none, nothing is left to train on")


@dataclass(frozen=True)
class MaskConfig:
    """Image tokens count less in the loss where the mask, from [latents] mask, is dark."""

    floor: float = setting(
        0.1, "the least weight of a token, where the mask is black: a little preserves the surroundings", bounds=(0.0, 1.0)
    )

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class ValidationConfig(tuner.ValidationConfig):
    share: float = setting(
        0.1, "share of the images that is held out, at least one image; the choice depends on content alone", bounds=(0.001, 1.0)
    )
    most: int = setting(16, "most images that are held out: each costs a forward pass per level and crop", bounds=(1, 10_000))
    paths: tuple[str, ...] = setting((), 'hold out these images instead, by wildcards on their paths: "held/*", "*_val.png"')
    sigmas: tuple[float, ...] = setting(
        (0.1, 0.3, 0.5, 0.7, 0.9), "the noise levels: fixed, so that losses can be compared", bounds=(0.0, 1.0)
    )
    seed: int = setting(0, "seed of the choice of images and of their noise", bounds=SEEDS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sigmas or not all(0 < sigma <= 1 for sigma in self.sigmas) or len(set(self.sigmas)) < len(self.sigmas):
            raise ValueError(
                f"sigmas must be different levels above 0, up to 1, such as [0.1, 0.5, 0.9], got {list(self.sigmas)}"
            )


def rates(config: DataConfig, crops: Sequence[tuple[int, str]]) -> list[float]:
    """By crop, (resolution, path of its image). Raises ValueError if a setting names what no crop has, or lacks a resolution."""
    weights = _weights(config, {resolution for resolution, _ in crops})
    folders = {folder.strip("/").removeprefix("./"): count for folder, count in (config.repeats or {}).items()}
    for given, folder in zip(config.repeats or {}, folders, strict=True):
        if not any(_below(path, folder) for _, path in crops):
            near = _near(folder, {str(above) for _, path in crops for above in PurePosixPath(path).parents})
            raise ValueError(f"[train.data] repeats: no image that is trained on has the path {given!r}{near}")
    # The longest path that matches decides.
    longest = sorted(folders, key=len, reverse=True)
    times = [next((folders[f] for f in longest if _below(path, f)), 1.0) for _, path in crops]
    found = [weights[resolution] * count for (resolution, _), count in zip(crops, times, strict=True)]
    most = max(found, default=0.0)
    return [rate / most for rate in found] if 0 < most < 1 else found  # else some epochs would have no crop


def _weights(config: DataConfig, present: Iterable[int]) -> dict[int, float]:
    """Relative frequency by resolution; the largest is 1."""
    resolutions = sorted(present)
    if config.resolutions is None:
        return dict.fromkeys(resolutions, 1.0)
    given = {int(name): float(weight) for name, weight in config.resolutions.items()}
    names = ", ".join(map(str, resolutions))
    for resolution in given:
        if resolution not in resolutions:
            raise ValueError(f"[train.data] resolutions: no crop has {resolution}; there are {names}")
    for resolution in resolutions:
        if resolution not in given:
            raise ValueError(f"[train.data] resolutions: {resolution} has no weight; 0 leaves it out; there are {names}")
    return {resolution: given[resolution] / max(given.values()) for resolution in resolutions}


def held_out(config: ValidationConfig, paths: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """The image_ids to hold out. `paths`: all paths of each image. Raises ValueError if `config.paths` matches none."""
    if config.paths:
        found = {i for i, own in paths.items() if any(fnmatchcase(nfc(path), nfc(p)) for path in own for p in config.paths)}
        if not found:
            raise ValueError(f"[train.validation] paths: {list(config.paths)} matches none of the {len(paths)} images")
        return frozenset(found)
    # The choice depends on image_ids and seed alone. Each image has a draw of its own, which added images do not change.
    drawn = sorted((draws.uniform(config.seed, f"held out {image_id}"), image_id) for image_id in paths)
    below = [image_id for u, image_id in drawn if u < config.share][: config.most]
    return frozenset(below or [image_id for _, image_id in drawn[:1]])


def _below(path: str, folder: str) -> bool:
    return PurePosixPath(nfc(path)).is_relative_to(nfc(folder))


def nfc(path: str) -> str:
    """macOS may store an umlaut as two characters, other systems as one."""
    return unicodedata.normalize("NFC", path)


def _near(word: str, words: Iterable[str]) -> str:
    found = difflib.get_close_matches(word, sorted(words), 1, 0.5)
    return f'; did you mean "{found[0]}"?' if found else ""
