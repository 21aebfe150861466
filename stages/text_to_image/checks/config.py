"""The settings of the stage `checks`."""

from __future__ import annotations

from dataclasses import dataclass

from stages.settings import check_bounds, runtime, selects


@dataclass(frozen=True)
class ChecksConfig:
    """The section [checks]: thresholds of the warnings. None of them excludes an image."""

    blur: float = selects(
        0.5,
        "least `blur` of a blurred picture; in the tests, sharp pictures have 0.42 at most, blurred ones 0.51 or more",
        bounds=(0.0, 1.0),
    )
    dark: float = selects(0.15, "largest `brightness` of an underexposed picture", bounds=(0.0, 1.0))
    bright: float = selects(0.8, "least `brightness` of an overexposed picture", bounds=(0.0, 1.0))
    clipped: float = selects(0.5, "least `clipped` of a badly exposed picture", bounds=(0.0, 1.0))
    border: float = selects(0.04, "least `border` of a picture with a border", bounds=(0.0, 1.0))
    short_side: int = selects(256, "`short_side` below which an image is very small, pixels", bounds=(1, 65536))
    aspect: float = selects(3.0, "largest usual `aspect`; longer pictures lose much to the crop", bounds=(1.0, 1e6))
    similarity: float = selects(
        0.94,
        "least `similarity` of near-duplicates; finds crops of 5 % and no two different pictures of the tests",
        bounds=(0.5, 1.0),
    )
    words: int = selects(300, "words above which a caption is too long; 512 tokens are read", bounds=(1, 100_000))
    repeated: float = selects(0.5, "share of captions with one phrase of five words from which it is named", bounds=(0.01, 1.0))
    imbalance: float = selects(
        10.0, "images of the largest folder per image of the smallest, from which it is named", bounds=(1.0, 1e9)
    )
    workers: int = runtime(4, "threads that read and decode", bounds=(1, 64))

    def __post_init__(self) -> None:
        check_bounds(self)
