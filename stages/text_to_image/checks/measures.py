"""What is measured in one picture (blur, exposure, borders), and which pictures are near-duplicates.

Near-duplicates are the same picture re-saved, rescaled, cropped a little, mirrored, or made lighter or darker. Perceptual
hashes (64 bits of a cosine transform) give candidates, by brute force over all pairs. Most look-alikes are excluded by the
correlation of coarse thumbnails. The others are compared at several crops, because a crop shifts the hash and the coarse
thumbnail.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from stages.text_to_image.imaging.decode import ROOM, ImageError, open_file, open_image, pixel_count

SIDE = 32  # pixels along a side of a thumbnail
LOW = 8  # cosine frequencies per side that the hash holds
CANDIDATE = 18  # bits in which two hashes may differ
COARSE = 0.5  # least correlation of the coarse thumbnails of 8 x 8 pixels
CHUNK = 1024  # hashes or pairs that are compared at a time
CROPS = (0.0, 0.025, 0.05)  # share of a side that a crop leaves out

Row = dict[str, Any]

LONGEST = 512  # pixels along the longer side at which a picture is measured: what is sharp there is sharp in training
CELL = 16  # pixels along a side of the parts in which detail is looked for
DETAIL = 3.0  # standard deviation of the brightness of a part with detail, of 255
SPAN = 9  # pixels over which the picture is blurred again
EVEN = 12.0  # brightness that a border line may differ from the edge, of 255
NOTHING: Row = {"blur": 0.0, "brightness": 0.5, "clipped": 0.0, "border": 0.0, "hash": "0" * 16, "thumbnail": bytes(SIDE * SIDE)}


def measure(path: Path) -> Row:
    """The measured columns of the table `checks`."""
    try:
        with open_file(path) as file, ROOM.taken(pixel_count(file)):
            return measure_picture(open_image(file, at_least=LONGEST).convert("L"))
    except ImageError:
        # It could be decoded when `images` read it: no warning here.
        return dict(NOTHING)


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
    even = np.abs(lines - colour).max(axis=1) <= EVEN
    count = int(np.argmin(even)) if not even.all() else 0
    # Where a drawing on a plain background begins, most pixels still have the background's colour.
    after = lines[min(count + 2, len(lines) - 1)]
    return count if count and (np.abs(after - colour) > EVEN).mean() > 0.7 else 0


# Near-duplicates


def perceptual_hashes(thumbnails: np.ndarray) -> np.ndarray:
    """One uint64 per grey thumbnail (n, 32, 32): which low frequencies of its cosine transform are above their median."""
    if not len(thumbnails):
        return np.zeros(0, np.uint64)
    basis = _cosines()
    low = np.einsum("ki,nij,lj->nkl", basis, thumbnails.astype(np.float32), basis).reshape(len(thumbnails), -1)
    # Without the mean, lighter and darker copies hash alike.
    low[:, 0] = 0  # the mean brightness
    bits = low > np.median(low, axis=1, keepdims=True)
    return np.packbits(bits, axis=1).view(">u8")[:, 0].astype(np.uint64)


def near_pairs(thumbnails: np.ndarray, least: float) -> list[tuple[int, int, float]]:
    """(i, j, similarity) with i < j. `thumbnails`: uint8 (n, 32, 32). Mirrored copies are found too."""
    hashes, mirrored = perceptual_hashes(thumbnails), perceptual_hashes(thumbnails[:, :, ::-1])
    found: dict[tuple[int, int], float] = {}
    coarse, coarse_mirrored = _coarse(thumbnails), _coarse(thumbnails[:, :, ::-1])
    # The mirror images' hashes against the plain ones: with `hashes` as the first, only unmirrored copies are found.
    for flip, first in ((False, hashes), (True, mirrored)):
        for pairs in _candidates(first, hashes):
            rough = (coarse_mirrored if flip else coarse)[pairs[:, 0]]
            pairs = pairs[np.einsum("nk,nk->n", rough, coarse[pairs[:, 1]]) >= COARSE]
            left = thumbnails[pairs[:, 0]]
            scores = similarities(left[:, :, ::-1] if flip else left, thumbnails[pairs[:, 1]])
            for (i, j), score in zip(pairs.tolist(), scores.tolist(), strict=True):
                if score >= least:
                    found[i, j] = max(score, found.get((i, j), 0.0))
    return [(i, j, score) for (i, j), score in sorted(found.items())]


def similarities(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Largest correlation over crops of either picture by up to 5 % of a side: float32 (n,), -1 to 1. Inputs are (n, 32, 32)."""
    best = np.full(len(left), -1.0, np.float32)
    whole = [_standardised(each.astype(np.float32)) for each in (left, right)]
    for down in _windows():
        for across in _windows():
            # Either picture may be the cropped one.
            for cropped, other in ((left, whole[1]), (right, whole[0])):
                part = np.einsum("ki,nij,lj->nkl", down, cropped.astype(np.float32), across, optimize=True)
                best = np.maximum(best, np.einsum("nk,nk->n", _standardised(part), other))
    return best


def _candidates(first: np.ndarray, second: np.ndarray) -> Iterator[np.ndarray]:
    """Index pairs (pairs, 2), i < j, whose hashes first[i] and second[j] differ in at most CANDIDATE bits; CHUNK at a time."""
    for start in range(0, len(first), CHUNK):
        differ = np.bitwise_count(first[start : start + CHUNK, None] ^ second[None, :])
        i, j = np.nonzero(differ <= CANDIDATE)
        pairs = np.stack([i + start, j], axis=1)[i + start < j]
        for part in range(0, len(pairs), CHUNK):
            yield pairs[part : part + CHUNK]


def _coarse(pictures: np.ndarray) -> np.ndarray:
    parts = SIDE // LOW
    blocks = pictures.reshape(len(pictures), LOW, parts, LOW, parts)
    return _standardised(blocks.mean(axis=(2, 4), dtype=np.float32))


def _standardised(pictures: np.ndarray) -> np.ndarray:
    """Pictures (n, side, side) as rows of mean 0 and length 1; a plain picture becomes zeros."""
    flat = pictures.reshape(len(pictures), pictures.shape[1] * pictures.shape[2])
    flat = flat - flat.mean(axis=1, keepdims=True)
    norm = np.linalg.norm(flat, axis=1, keepdims=True)
    return np.asarray(np.where(norm > 1e-3, flat / np.maximum(norm, 1e-3), 0.0), np.float32)


@cache
def _cosines() -> np.ndarray:
    places = (np.arange(SIDE) + 0.5) / SIDE
    return np.cos(np.pi * np.arange(LOW)[:, None] * places[None, :]).astype(np.float32)


@cache
def _windows() -> tuple[np.ndarray, ...]:
    """Matrices (32, 32) that crop a line by a share of CROPS at its start, its end or both, and stretch it linearly."""
    found = {}
    for share in CROPS:
        for start in {0.0, share / 2, share}:
            places = np.clip((start + (1 - share) * (np.arange(SIDE) + 0.5) / SIDE) * SIDE - 0.5, 0, SIDE - 1)
            low = np.floor(places).astype(int)
            matrix = np.zeros((SIDE, SIDE), np.float32)
            matrix[np.arange(SIDE), low] += 1 - (places - low)
            matrix[np.arange(SIDE), np.minimum(low + 1, SIDE - 1)] += places - low
            found[share, start] = matrix
    return tuple(found.values())
