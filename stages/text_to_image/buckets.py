"""buckets: at which size each image is trained, and which part of it. Pure arithmetic on a grid of 16-pixel cells.

A cell is one token: the autoencoder's 8 pixels, in patches of 2 x 2. Shapes are counted in cells and called (i, j).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.text_to_image.buckets import BUCKETS
from schemas.text_to_image.images import IMAGES
from stages.settings import selects, setting
from stages.stage import Stage, StageContext

STEP = 16  # pixels a cell
LONGEST = 8.0  # the longest shape, long side over short side; a longer image is cropped to it
BATCH = 4096  # rows


@dataclass(frozen=True)
class BucketsConfig:
    """Section [buckets]."""

    resolutions: tuple[int, ...] = selects((512, 768), "R, pixels: each image once at each R, at an area of at most R x R")
    upscale: bool = setting(False, "enlarge an image with less area than R x R; otherwise it is trained at its own size")
    max_shapes: int = setting(
        256, "shapes of full area at one R, evenly over the aspect ratios; 256 are all there are up to 1024"
    )

    def __post_init__(self) -> None:
        for resolution in self.resolutions:
            if resolution < STEP or resolution % STEP:
                below = max(STEP, resolution // STEP * STEP)
                near = f"{below} or {below + STEP}" if resolution > STEP else f"{STEP}"
                raise ValueError(f"buckets.resolutions: {resolution} is not a multiple of {STEP}; {near} would be")
        if not self.resolutions or len(set(self.resolutions)) < len(self.resolutions):
            raise ValueError("buckets.resolutions must name at least one resolution, and none twice: [512, 768]")
        if self.max_shapes < 1:
            raise ValueError(f"buckets.max_shapes = {self.max_shapes} must be at least 1, which makes every image square")


@dataclass(frozen=True)
class Bucket:
    """A size in pixels, and the centred part of the image, in source pixels, that has exactly its aspect ratio."""

    width: int
    height: int
    crop_x: float
    crop_y: float
    crop_w: float
    crop_h: float
    scale: float
    crop_loss: float
    tokens: int


def bucket(width: int, height: int, resolution: int, upscale: bool = False, max_shapes: int = 256) -> Bucket | None:
    """The bucket of an image of that size; None if not even one cell fits into it.

    Among the shapes of full area, the one that crops least. If that would enlarge the image, then among all smaller
    shapes that fit into it, the one for which the share cropped plus the share of pixels given up is least.
    """
    if width < height:
        turned = bucket(height, width, resolution, upscale, max_shapes)
        return turned and _crop(width, height, turned.height // STEP, turned.width // STEP)
    cells = resolution // STEP
    i, j = _least(width, height, *_shapes(cells, max_shapes), area=None)
    if upscale or (i * STEP <= width and j * STEP <= height):
        return _crop(width, height, i, j)
    all_i, all_j = _shapes_up_to(cells, max_shapes)
    fits = (all_i * STEP <= width) & (all_j * STEP <= height)
    if not fits.any():
        return None
    area = min(cells * cells, width * height / STEP**2)
    return _crop(width, height, *_least(width, height, all_i[fits], all_j[fits], area=area))


def _least(width: int, height: int, i: np.ndarray, j: np.ndarray, area: float | None) -> tuple[int, int]:
    """The shape that loses least: by cropping, and where `area` is given, by covering less than that many cells."""
    skew = (i * height) / (j * width)
    loss = 1 - np.minimum(skew, 1 / skew)
    if area is not None:
        loss = loss + 1 - i * j / area
    best = int(np.lexsort((-i * j, np.round(loss, 12)))[0])  # of equal ones the larger
    return int(i[best]), int(j[best])


def _crop(width: int, height: int, i: int, j: int) -> Bucket:
    """Cover the shape with the image: one side is used in full, the other loses the same at both ends."""
    across, down = i * STEP, j * STEP
    if across * height >= down * width:
        crop_w, crop_h, scale = float(width), min(float(height), width * down / across), across / width
    else:
        crop_w, crop_h, scale = min(float(width), height * across / down), float(height), down / height
    kept = (crop_w / width) * (crop_h / height)
    return Bucket(across, down, (width - crop_w) / 2, (height - crop_h) / 2, crop_w, crop_h, scale, 1 - kept, i * j)


@functools.cache
def _shapes(cells: int, max_shapes: int) -> tuple[np.ndarray, np.ndarray]:
    """Landscape shapes of at most cells x cells tokens: for every width the tallest, for every height the widest."""
    full = {(i, cells * cells // i) for i in range(1, cells * cells + 1)}
    full = {(max(shape), min(shape)) for shape in full if max(shape) <= LONGEST * min(shape)}
    ranked = sorted(full, key=lambda shape: shape[0] / shape[1])
    if 2 * len(ranked) - 1 > max_shapes:  # the square counts once, all others lying and standing
        aspects = np.log([i / j for i, j in ranked])
        targets = np.linspace(0, aspects[-1], (max_shapes + 1) // 2)
        ranked = sorted({ranked[int(np.abs(aspects - target).argmin())] for target in targets})
    found = np.array(ranked, np.int64)
    return found[:, 0], found[:, 1]


@functools.cache
def _shapes_up_to(cells: int, max_shapes: int) -> tuple[np.ndarray, np.ndarray]:
    """The shapes of this size and of every smaller one."""
    sizes = [np.stack(_shapes(size, max_shapes)) for size in range(1, cells + 1)]
    found = np.unique(np.concatenate(sizes, axis=1), axis=1)
    return found[0], found[1]


# The table.


def wanted_buckets(ctx: StageContext) -> pa.Table:
    """All rows, in full: arithmetic is cheaper than asking what has changed."""
    images = ctx.rows(IMAGES).select(["image_id", "width", "height", "rejected"]).to_pylist()
    usable = {row["image_id"]: (row["width"], row["height"]) for row in images if row["rejected"] is None}
    if not usable:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(Counter(row["rejected"] for row in images).items()))
        raise ValueError(f"none of the {len(images)} images can be used: {reasons}")
    rows = [row for image_id in sorted(usable) for row in _rows(image_id, *usable[image_id], ctx.config)]
    return pa.Table.from_pylist(rows, schema=BUCKETS.batch)


def _rows(image_id: str, width: int, height: int, config: BucketsConfig) -> Iterator[dict[str, Any]]:
    """One row per resolution, lowest first; a resolution that adds nothing to a lower one is rejected."""
    seen = set()
    for resolution in sorted(config.resolutions):
        found = _cached(width, height, resolution, config.upscale, config.max_shapes)
        same = found in seen
        seen.add(found)
        rejected = "too_small" if found is None else "same_crop" if same else None
        values = vars(found or Bucket(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0))
        yield {"image_id": image_id, "resolution": resolution, **values, "rejected": rejected}


_cached = functools.lru_cache(maxsize=65536)(bucket)  # folders hold many images of the same size


def assign_buckets(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """The pending rows as they are, and what they come to."""
    yield from ctx.pending.select(BUCKETS.batch.names).to_batches(max_chunksize=BATCH)
    if ctx.pending.num_rows:
        used = [row for row in ctx.pending.to_pylist() if row["rejected"] is None]
        for resolution in sorted(ctx.config.resolutions):
            _summarise(ctx, resolution, [row for row in used if row["resolution"] == resolution])


def _summarise(ctx: StageContext, resolution: int, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    shapes = len({(row["width"], row["height"]) for row in rows})
    loss = sum(row["crop_loss"] for row in rows) / len(rows)
    low = resolution**2 / 4
    small = sum(row["width"] * row["height"] < low for row in rows)
    note = f"; {small} with less than a quarter of its pixels, at their own size" if small else ""
    ctx.say(f"{resolution}: {len(rows)} images in {shapes} shapes, {loss:.1%} cropped away on average{note}")


STAGE = Stage(reads=(IMAGES,), writes=BUCKETS, config=BucketsConfig, wants=wanted_buckets, run=assign_buckets)
