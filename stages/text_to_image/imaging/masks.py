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
    """Yield the paths at which the mask of an image may lie, without the suffix of the mask's format. The preferred
    path comes first. `path` is the path of the image. For example, "a/cat.jpg" gives "a/cat.mask", "a/masks/cat" and
    "masks/a/cat". A mask at "a/cat.mask" is a file such as "a/cat.mask.png".
    """
    image = PurePosixPath(path)
    yield str(image.with_name(f"{image.stem}.mask"))
    for above in image.parents:
        yield str(above / FOLDER / image.relative_to(above).with_name(image.stem))


def which_are_masks(paths: Iterable[str]) -> set[str]:
    """Return the paths in `paths` whose names say that they are masks of other files in `paths`. For example,
    "a.mask.png" is a mask if "a.jpg" is there too. No file is opened.
    """
    paths = list(paths)
    places = {composed(place) for path in paths for place in mask_candidates(path)}
    return {path for path in paths if _may_be_mask(path) and _without_suffix(path) in places}


def mask_finder(folder: Path) -> Callable[[Iterable[str]], str | None]:
    """Return a function that finds the mask file of an image in the image folder `folder`. The function takes the paths
    of an image and its duplicates. It returns the path of the mask, or None. All paths are relative to `folder`.

    Every folder is listed once. If several files could be the mask at one place, the first by name is taken.
    """

    @functools.cache
    def masks_in(parent: str) -> dict[str, str]:
        try:
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


def read_mask(path: Path, data: bytes) -> Image.Image:
    """Decode a mask file and return the mask in mode "L". `path` is the file's path, for errors. `data` holds the file's
    bytes. Transparent pixels become black. Raises ImageError if `data` is not an image.
    """
    try:
        return open_image(io.BytesIO(data), "#000000").convert("L")
    except ImageError as error:
        raise ImageError(error.reason, f"its mask {path.name}: {error.detail}") from error


def same_aspect_ratio(mask: Image.Image, image: Image.Image) -> bool:
    """Return True if the aspect ratios of the mask and the image differ by at most 1 percent."""
    skew = mask.width * image.height / (mask.height * image.width)
    return abs(skew - 1) <= TOLERANCE


def token_mask(mask: Image.Image, image_size: tuple[int, int], crop: Mapping[str, Any]) -> bytes:
    """Return the mask of one crop as bytes, row by row. Each byte (0 to 255) is the mean over the 16 x 16 pixels of one
    token. `mask` is the mask of the whole image, of any size. `image_size` is the width and height of the image in
    pixels. `crop` is a row of the table `latents`. It holds `crop_x`, `crop_y`, `crop_w` and `crop_h` in image pixels,
    `width` and `height` of the resized crop, and `flip`.
    """
    across, down = mask.width / image_size[0], mask.height / image_size[1]
    left, top = max(0.0, crop["crop_x"] * across), max(0.0, crop["crop_y"] * down)
    right = min(float(mask.width), (crop["crop_x"] + crop["crop_w"]) * across)
    bottom = min(float(mask.height), (crop["crop_y"] + crop["crop_h"]) * down)
    size = (crop["width"] // TOKEN, crop["height"] // TOKEN)
    cells = mask.resize(size, Image.Resampling.BOX, box=(left, top, right, bottom))
    return (ImageOps.mirror(cells) if crop["flip"] else cells).tobytes()


def _may_be_mask(path: str) -> bool:
    return PurePosixPath(path).suffix.lower() in SUFFIXES


def _without_suffix(path: str) -> str:
    return composed(str(PurePosixPath(path).with_suffix("")))


def composed(path: str) -> str:
    """Return a path in Unicode's composed form (NFC). macOS may store an umlaut as two characters, other systems as one."""
    return unicodedata.normalize("NFC", path)
