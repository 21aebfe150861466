"""Masks: which part of an image is trained on. White is trained, black is not, grey counts in part.

A mask is the image's own alpha channel, or a file beside it: cat.mask.png for cat.jpg, or masks/cat.png in its folder or in
a folder above, below which it lies as the image does. It may be of another size than the image, though of the same shape.

It is kept at the latent's resolution: one byte per token, row by row, the mean over the token's 16 x 16 pixels.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from PIL import Image, ImageOps

from stages.text_to_image.imaging.decode import ImageError, open_image

FOLDER = "masks"
SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
TOKEN = 16  # pixels along a side
SKEW = 0.01  # by how much a mask's sides may be out of proportion: a mask of half the size is rounded


def places(path: str) -> Iterator[str]:
    """Where a mask of that image may lie, without suffixes, the first place first."""
    image = PurePosixPath(path)
    yield str(image.with_name(f"{image.stem}.mask"))
    for above in image.parents:
        yield str(above / FOLDER / image.relative_to(above).with_name(image.stem))


def among(paths: Iterable[str]) -> set[str]:
    """Those of the files that are, by their names, a mask of another one of them."""
    paths = list(paths)
    taken = {place for path in paths for place in places(path)}
    return {path for path in paths if _may_be(path) and _bare(path) in taken}


def finder(folder: Path) -> Callable[[Iterable[str]], str | None]:
    """A function that finds the mask of an image that has these names below the folder: its path below it, or None."""

    @functools.cache
    def there(parent: str) -> dict[str, str]:
        try:
            names = sorted((file.name for file in (folder / parent).iterdir()), reverse=True)
        except OSError:
            return {}
        paths = [str(PurePosixPath(parent) / name) for name in names]
        return {_bare(path): path for path in paths if _may_be(path)}  # of several the first by name

    def find(paths: Iterable[str]) -> str | None:
        found = (there(str(PurePosixPath(place).parent)).get(place) for path in paths for place in places(path))
        return next((path for path in found if path), None)

    return find


def read_mask(path: Path, data: bytes) -> Image.Image:
    """A mask file's grey values; what is transparent in it is black. ImageError, with its name, for one that cannot be read."""
    try:
        return open_image(io.BytesIO(data), "#000000").convert("L")
    except ImageError as error:
        raise ImageError(error.reason, f"its mask {path.name}: {error.detail}") from error


def fits(mask: Image.Image, image: Image.Image) -> bool:
    """Whether mask and image have the same shape, but for rounding."""
    skew = mask.width * image.height / (mask.height * image.width)
    return abs(skew - 1) <= SKEW


def per_token(mask: Image.Image, image_size: tuple[int, int], crop: Mapping[str, Any]) -> bytes:
    """The bytes of one crop's tokens: the mask cut and mirrored as the image is, each token the mean over its pixels."""
    across, down = mask.width / image_size[0], mask.height / image_size[1]
    left, top = max(0.0, crop["crop_x"] * across), max(0.0, crop["crop_y"] * down)
    right = min(float(mask.width), (crop["crop_x"] + crop["crop_w"]) * across)
    bottom = min(float(mask.height), (crop["crop_y"] + crop["crop_h"]) * down)
    size = (crop["width"] // TOKEN, crop["height"] // TOKEN)
    cells = mask.resize(size, Image.Resampling.BOX, box=(left, top, right, bottom))
    return (ImageOps.mirror(cells) if crop["flip"] else cells).tobytes()


def _may_be(path: str) -> bool:
    return PurePosixPath(path).suffix.lower() in SUFFIXES


def _bare(path: str) -> str:
    return str(PurePosixPath(path).with_suffix(""))
