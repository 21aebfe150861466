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
    """The measured columns of the table `checks`."""
    try:
        image = open_image(path, at_least=LONGEST).convert("L")
    except ImageError:
        # It could be decoded when `images` read it: no warning here.
        return dict(NOTHING)
    return measure_picture(image)


def measure_picture(image: Image.Image) -> Row:
    """The same of a picture in mode "L", which is reduced in place. Blur, brightness, clipped and border are 0 to 1."""
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
    """0 (sharp) to 1, the smaller of rows and columns; 0 for a plain picture. `grey`: float32 (height, width), 0 to 255.

    Differences of neighbours shrink much in a blurred copy of a sharp picture, and little if it is blurred already (Crete et
    al., 2007).
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
    # A plain picture is not blurred.
    return float(1 - np.maximum(before - after, 0).sum() / total) if total > before.size * 0.05 else 0.0


def exposure(grey: np.ndarray) -> tuple[float, float]:
    """(mean brightness, share of black or white pixels), 0 to 1, of the cells of 16 x 16 pixels that have detail."""
    down, across = grey.shape[0] // CELL, grey.shape[1] // CELL
    if not (down and across):
        return round(float(grey.mean() / 255), 4), 0.0
    cells = grey[: down * CELL, : across * CELL].reshape(down, CELL, across, CELL).swapaxes(1, 2).reshape(down * across, -1)
    # A plain white background is no overexposure.
    parts = cells[cells.std(axis=1) > DETAIL]
    if not len(parts):
        return round(float(grey.mean() / 255), 4), 0.0
    return round(float(parts.mean() / 255), 4), round(float(((parts <= 2) | (parts >= 253)).mean()), 4)


def border(grey: np.ndarray) -> float:
    """Share of the picture in two plain bars at opposite sides that end sharply, such as a letterbox; the larger of both
    directions.
    """
    return round(max(_border_along(grey), _border_along(grey.T)), 4)


def _border_along(grey: np.ndarray) -> float:
    top, bottom = (_even_lines(lines) for lines in (grey, grey[::-1]))
    return (top + bottom) / len(grey) if top and bottom and top + bottom < len(grey) else 0.0


def _even_lines(lines: np.ndarray) -> int:
    """Thickness of the border at the first line, or 0 without one. `lines`: float32 (lines, pixels), from the edge inwards."""
    colour = float(np.median(lines[0]))
    even = np.abs(lines - colour).max(axis=1) <= 3 * EVEN
    count = int(np.argmin(even)) if not even.all() else 0
    # Where a drawing on a plain background begins, most pixels still have the background's colour.
    after = lines[min(count + 2, len(lines) - 1)]
    return count if count and (np.abs(after - colour) > 3 * EVEN).mean() > 0.7 else 0
