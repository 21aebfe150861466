"""What is measured in one picture: blur, exposure, borders, and a thumbnail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from stages.text_to_image.checks.near import SIDE, perceptual_hashes
from stages.text_to_image.imaging.decode import ImageError, open_image

Row = dict[str, Any]

LONGEST = 512  # pixels along the longer side at which a picture is measured: what is sharp there is sharp in training
CELL = 16  # pixels along a side of the parts in which detail is looked for
DETAIL = 3.0  # standard deviation of the brightness of a part with detail, of 255
SPAN = 9  # pixels over which the picture is blurred again
EVEN = 4.0  # brightness that a border line may differ from the edge, of 255
NOTHING: Row = {"blur": 0.0, "brightness": 0.5, "clipped": 0.0, "border": 0.0, "hash": "0" * 16, "thumbnail": bytes(SIDE * SIDE)}


def measure(path: Path) -> Row:
    """Measure the image file at `path`, and return the values as a dict from column of the table `checks` to value. The
    keys are those of `measure_picture`. If the file can no longer be decoded, the values are those of an image without
    fault, such as a blur of 0.
    """
    try:
        image = open_image(path, at_least=LONGEST).convert("L")
    except ImageError:
        return dict(NOTHING)
    return measure_picture(image)


def measure_picture(image: Image.Image) -> Row:
    """Measure a picture, and return the values as a dict. `image` is the picture in mode "L"; this call makes it
    smaller. `blur`, `brightness`, `clipped` (the share of black or white pixels) and `border` (the share that is
    border) are 0 to 1. `hash` is a perceptual hash as 16 hex digits. `thumbnail` is the picture in 32 x 32 pixels as
    bytes, one byte per pixel.
    """
    image.thumbnail((LONGEST, LONGEST), Image.Resampling.BOX)
    grey = np.asarray(image, np.float32)
    thumbnail = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX))
    brightness, clipped = exposure(grey)
    return {
        "blur": blur(grey),
        "brightness": brightness,
        "clipped": clipped,
        "border": border(grey),
        "hash": f"{int(perceptual_hashes(thumbnail[None])[0]):016x}",
        "thumbnail": thumbnail.tobytes(),
    }


def blur(grey: np.ndarray) -> float:
    """Return how blurred a picture is, from 0 (sharp) to 1. `grey` holds the picture's brightness, float32 (height, width),
    0 to 255. The blur is measured along rows and along columns, and the smaller value is returned. A picture of one colour
    gives 0.

    The measure compares the picture with a blurred copy of itself. The differences between neighbouring pixels become much
    smaller in the copy if the picture is sharp, and little smaller if it is already blurred (Crete and others, 2007).
    """
    return round(float(min(_blur_along(grey), _blur_along(grey.T))), 4)


def _blur_along(grey: np.ndarray) -> float:
    if grey.shape[1] <= SPAN:
        return 0.0
    sums = np.cumsum(np.pad(grey.astype(np.float64), ((0, 0), (1, 0))), axis=1)
    smooth = (sums[:, SPAN:] - sums[:, :-SPAN]) / SPAN
    half = SPAN // 2
    before = np.abs(np.diff(grey[:, half : half + smooth.shape[1]].astype(np.float64), axis=1))
    after = np.abs(np.diff(smooth, axis=1))
    total = before.sum()
    return float(1 - np.maximum(before - after, 0).sum() / total) if total > before.size * 0.05 else 0.0


def exposure(grey: np.ndarray) -> tuple[float, float]:
    """Return (brightness, clipped) of a picture. `brightness` is the mean brightness, 0 to 1. `clipped` is the share of
    pixels that are black or white. `grey` holds the picture's brightness, float32 (height, width), 0 to 255. Only cells
    of 16 x 16 pixels whose brightness varies are counted. So a plain white background does not count. If no cell
    varies, the result is the mean brightness of the whole picture, and 0.
    """
    down, across = grey.shape[0] // CELL, grey.shape[1] // CELL
    if not (down and across):
        return round(float(grey.mean() / 255), 4), 0.0
    cells = grey[: down * CELL, : across * CELL].reshape(down, CELL, across, CELL).swapaxes(1, 2).reshape(down * across, -1)
    parts = cells[cells.std(axis=1) > DETAIL]
    if not len(parts):
        return round(float(grey.mean() / 255), 4), 0.0
    return round(float(parts.mean() / 255), 4), round(float(((parts <= 2) | (parts >= 253)).mean()), 4)


def border(grey: np.ndarray) -> float:
    """Return the share of a picture that is a border, from 0 (no border) to 1. `grey` holds the picture's brightness,
    float32 (height, width), 0 to 255. A border is two plain bars at opposite sides, such as the black bars of a
    letterbox. Each bar must end sharply: most pixels just beyond the bar must have another colour.

    The plain background of a drawing is no border. Where the drawing begins, most pixels still have the colour of the
    background. The bars at top and bottom are measured separately from those at left and right, and the larger share is
    returned.
    """
    return round(max(_border_along(grey), _border_along(grey.T)), 4)


def _border_along(grey: np.ndarray) -> float:
    top, bottom = (_even_lines(lines) for lines in (grey, grey[::-1]))
    return (top + bottom) / len(grey) if top and bottom and top + bottom < len(grey) else 0.0


def _even_lines(lines: np.ndarray) -> int:
    """Return the thickness of a border in pixels, or 0 if there is no border. `lines` holds the rows or columns of a
    picture from one edge inwards, float32 `(lines, pixels)`, as brightness from 0 to 255. The border is made of the
    first lines whose pixels all have nearly one brightness. The picture must change sharply where the border ends: the
    third line after the border is checked, and more than 70% of its pixels must differ clearly from the border.
    Otherwise, the result is 0.

    For example, if lines 0 to 9 are black, line 12 is checked. If the picture ends before that line, the last line is
    checked. "Nearly" means a difference of at most 12 from the median of line 0, and "clearly" means more than 12. If
    all lines have nearly one brightness, the result is 0.
    """
    colour = float(np.median(lines[0]))
    even = np.abs(lines - colour).max(axis=1) <= 3 * EVEN
    count = int(np.argmin(even)) if not even.all() else 0
    after = lines[min(count + 2, len(lines) - 1)]
    return count if count and (np.abs(after - colour) > 3 * EVEN).mean() > 0.7 else 0
