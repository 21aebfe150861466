"""Masks: which part of an image is trained on. White is trained, black is not, grey counts in part.

A mask is the image's own alpha channel or a file beside the image: cat.mask.png for cat.jpg, or masks/cat.png in the
image's folder or in a folder above (masks/a/cat.png for a/cat.jpg). It may be smaller or larger than the image, but must
have the same aspect ratio. It is stored at the latent's resolution: one byte per token of 16 x 16 pixels.
"""

from __future__ import annotations

import functools
import io
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from PIL import Image, ImageOps

from stages.text_to_image.imaging.decode import ImageError, open_image

FOLDER = "masks"
SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
TOKEN = 16  # pixels along one side of a token
TOLERANCE = 0.01  # relative difference of the aspect ratios that is allowed: the sides of a smaller mask are rounded


def mask_candidates(path: str) -> Iterator[str]:
    """Paths of the mask without suffix, the preferred one first: a/cat.mask, a/masks/cat and masks/a/cat for "a/cat.jpg"."""
    image = PurePosixPath(path)
    yield str(image.with_name(f"{image.stem}.mask"))
    for above in image.parents:
        yield str(above / FOLDER / image.relative_to(above).with_name(image.stem))


def which_are_masks(paths: Iterable[str]) -> set[str]:
    paths = list(paths)
    places = {composed(place) for path in paths for place in mask_candidates(path)}
    return {path for path in paths if _may_be_mask(path) and _without_suffix(path) in places}


def mask_finder(folder: Path) -> Callable[[Iterable[str]], str | None]:
    """A function from the paths of an image and its duplicates to its mask file. It lists every folder once."""

    @functools.cache
    def masks_in(parent: str) -> dict[str, str]:
        try:
            # Reversed, so that of several files for one image the first by name is left in the dict.
            names = sorted((file.name for file in (folder / parent).iterdir() if not file.name.startswith(".")), reverse=True)
        except OSError:
            return {}
        paths = [str(PurePosixPath(parent) / name) for name in names]
        return {_without_suffix(path): path for path in paths if _may_be_mask(path)}

    def find(paths: Iterable[str]) -> str | None:
        places = (place for path in paths for place in mask_candidates(path))
        found = (masks_in(str(PurePosixPath(place).parent)).get(composed(place)) for place in places)
        return next((path for path in found if path), None)

    return find


def read_mask(path: Path, data: bytes, image: Image.Image) -> Image.Image:
    """Mode "L"; transparent pixels become black. Raises ImageError if it is no mask of `image`. `path` is for errors."""
    try:
        mask = open_image(io.BytesIO(data), "#000000").convert("L")
    except ImageError as error:
        raise ImageError(error.reason, f"its mask {path.name}: {error.detail}") from error
    if abs(mask.width * image.height / (mask.height * image.width) - 1) > TOLERANCE:
        sizes = f"{mask.width} x {mask.height}, the image {image.width} x {image.height}"
        raise ImageError("mask", f"{path.name} is {sizes}: the aspect ratios differ")
    return mask


def cut(
    picture: Image.Image, size: tuple[int, int], crop: Mapping[str, Any], unit: int, resample: Image.Resampling
) -> Image.Image:
    """A crop of an image of `size` pixels, or of its mask, with one value per `unit` trained pixels along each side.

    `crop`: a row of the table `latents`; its edges may be fractions of a pixel.
    """
    across, down = picture.width / size[0], picture.height / size[1]
    # Pillow refuses a box that rounding puts outside the picture.
    left, top = max(0.0, crop["crop_x"] * across), max(0.0, crop["crop_y"] * down)
    right = min(float(picture.width), (crop["crop_x"] + crop["crop_w"]) * across)
    bottom = min(float(picture.height), (crop["crop_y"] + crop["crop_h"]) * down)
    sized = picture.resize((crop["width"] // unit, crop["height"] // unit), resample, box=(left, top, right, bottom))
    return ImageOps.mirror(sized) if crop["flip"] else sized


def token_mask(mask: Image.Image, image_size: tuple[int, int], crop: Mapping[str, Any]) -> bytes:
    """The mask of one crop, row by row: each byte the mean over one token."""
    return cut(mask, image_size, crop, TOKEN, Image.Resampling.BOX).tobytes()


def _may_be_mask(path: str) -> bool:
    return PurePosixPath(path).suffix.lower() in SUFFIXES


def _without_suffix(path: str) -> str:
    return composed(str(PurePosixPath(path).with_suffix("")))


def composed(path: str) -> str:
    """NFC: macOS may store an umlaut as two characters, other systems as one."""
    return unicodedata.normalize("NFC", path)
