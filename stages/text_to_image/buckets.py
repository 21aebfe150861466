"""The stage `buckets`: at which size each image is trained, and which part of the image is used (the crop).

A size is counted in cells of 16 x 16 pixels, one cell per token of the transformer: the autoencoder shrinks 8 pixels to 1,
and the transformer reads patches of 2 x 2. A shape is (i, j): i cells wide, j cells high.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.text_to_image.buckets import BUCKETS
from schemas.text_to_image.checks import CHECKS
from schemas.text_to_image.images import IMAGES
from stages.settings import check_bounds, selects, setting
from stages.stage import Stage, StageContext
from stages.text_to_image.imaging.references import USE
from stages.text_to_image.imaging.usable import usable_rows
from stages.text_to_image.selecting import select_images

STEP = 16  # pixels along one side of a cell
LONGEST = 8.0  # largest aspect ratio, long side over short side; a longer image is cropped to it
BATCH = 4096  # rows per record batch


@dataclass(frozen=True)
class BucketsConfig:
    """The section [buckets] of project.toml: the sizes at which images are trained. `resolutions` are in pixels,
    multiples of 16. Every image is trained once per resolution R, at an area of at most R x R. `upscale` allows images
    to be enlarged. `max_shapes` limits the number of shapes (width and height) per resolution. `where` is an SQL
    condition that chooses images. Raises ValueError if a
    setting is out of range, or if a resolution occurs twice.
    """

    resolutions: tuple[int, ...] = selects(
        (512, 768), "resolutions R, pixels: every image is trained once per R, at an area of at most R x R", bounds=(16, 4096)
    )
    upscale: bool = setting(False, "enlarge an image that has fewer than R x R pixels; otherwise it keeps its own size")
    max_shapes: int = setting(
        256,
        "shapes of full area per R, spread evenly over the aspect ratios; 256: all, up to R = 1024; 1: squares only",
        bounds=(1, 10_000),
    )
    where: str = selects(
        "",
        'SQL condition on columns of checks and images that an image must meet: "blur < 0.5 and duplicate_of is null"; '
        "empty: all",
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        for resolution in self.resolutions:
            if resolution < STEP or resolution % STEP:
                below = max(STEP, resolution // STEP * STEP)
                near = f"{below} or {below + STEP}" if resolution > STEP else f"{STEP}"
                raise ValueError(f"resolutions must be multiples of {STEP}, such as {near}, got {resolution}")
        if not self.resolutions or len(set(self.resolutions)) < len(self.resolutions):
            got = list(self.resolutions)
            raise ValueError(f"resolutions must name at least one resolution, and none twice, such as [512, 768], got {got}")


@dataclass(frozen=True)
class Bucket:
    """The size at which an image is trained, and the crop that is scaled to this size. `width` and `height` are the
    size in pixels, multiples of 16. `crop_x`, `crop_y`, `crop_w` and `crop_h` are the left edge, top edge, width and
    height of the crop, in source pixels.

    The values of the crop may be fractions. `scale` is in trained pixels per source pixel. `crop_loss` is the share of
    the image's area that is cropped away, 0 to 1. `tokens` is the number of cells of 16 x 16 pixels in the size.
    """

    width: int
    height: int
    crop_x: float
    crop_y: float
    crop_w: float
    crop_h: float
    scale: float
    crop_loss: float
    tokens: int


def choose_bucket(width: int, height: int, resolution: int, upscale: bool = False, max_shapes: int = 256) -> Bucket | None:
    """Return the size and the crop at which to train an image of `width` x `height` pixels, as a `Bucket`. The area of
    the size is at most `resolution` x `resolution` pixels. If `upscale` is False, the image is never enlarged.
    `max_shapes` limits the number of shapes (width and height) to choose from. Returns None if `upscale` is False and a
    side is shorter than 16 pixels.

    First, the shapes of full area are tried: those that cannot grow within the area. There are at most `max_shapes` of
    them, portrait and landscape together. The one that crops least is chosen.

    If that shape would enlarge the image and `upscale` is False, the shape is chosen among all smaller ones that fit
    into the image. Then the sum of two shares is smallest: the share cropped away and the share of pixels given up.
    """
    if width < height:
        turned = choose_bucket(height, width, resolution, upscale, max_shapes)
        return turned and _make_bucket(width, height, turned.height // STEP, turned.width // STEP)
    cells = resolution // STEP
    i, j = _best_shape(width, height, *_full_shapes(cells, max_shapes), area=None)
    if upscale or (i * STEP <= width and j * STEP <= height):
        return _make_bucket(width, height, i, j)
    all_i, all_j = _all_shapes(cells, max_shapes)
    fits = (all_i * STEP <= width) & (all_j * STEP <= height)
    if not fits.any():
        return None
    area = min(cells * cells, width * height / STEP**2)
    return _make_bucket(width, height, *_best_shape(width, height, all_i[fits], all_j[fits], area=area))


def _best_shape(width: int, height: int, i: np.ndarray, j: np.ndarray, area: float | None) -> tuple[int, int]:
    """Return the shape that suits an image of `width` x `height` pixels best. A shape is (width, height) in cells of 16
    x 16 pixels. `i` and `j` hold the widths and the heights of the shapes to choose from. If `area` is None, the shape
    that crops away the smallest share of the image is best. If `area` is a number of cells, the best shape has the
    smallest sum of two shares: the share of the image that is cropped away, and the share of `area` that is left
    unused.

    For example, a shape that crops away 10% of the image and has 80% of the cells of `area` has the sum 0.1 + 0.2 =
    0.3. Of equally good shapes, the largest is returned.
    """
    skew = (i * height) / (j * width)
    loss = 1 - np.minimum(skew, 1 / skew)
    if area is not None:
        loss = loss + 1 - i * j / area
    best = int(np.lexsort((-i * j, np.round(loss, 12)))[0])
    return int(i[best]), int(j[best])


def _make_bucket(width: int, height: int, i: int, j: int) -> Bucket:
    """Return the bucket for an image of `width` x `height` pixels. The image is trained at `i` x `j` cells of 16 x 16
    pixels. One side of the image is used in full. The other is cropped equally at both ends.
    """
    across, down = i * STEP, j * STEP
    if across * height >= down * width:
        crop_w, crop_h, scale = float(width), min(float(height), width * down / across), across / width
    else:
        crop_w, crop_h, scale = min(float(width), height * across / down), float(height), down / height
    kept = (crop_w / width) * (crop_h / height)
    return Bucket(across, down, (width - crop_w) / 2, (height - crop_h) / 2, crop_w, crop_h, scale, 1 - kept, i * j)


@functools.cache
def _full_shapes(cells: int, max_shapes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the shapes from which an image's size is chosen, as two int64 arrays. The first array holds the widths and
    the second the heights, in cells of 16 x 16 pixels. `cells` sets the area: a shape has at most `cells` * `cells`
    cells. The height is never larger than the width. The narrowest shape comes first. `max_shapes` limits the number of
    shapes.

    A shape has at most `cells` * `cells` cells and an aspect ratio of at most 8. For `max_shapes`, a shape that is not
    square counts twice, as landscape and as portrait. All shapes have full area: the height or the width cannot grow by
    a cell within the limit. If there are too many shapes, some are left out. The remaining shapes are spread evenly
    over the logarithm of the aspect ratio.
    """
    full = {(i, cells * cells // i) for i in range(1, cells * cells + 1)}
    full = {(max(shape), min(shape)) for shape in full if max(shape) <= LONGEST * min(shape)}
    ranked = sorted(full, key=lambda shape: shape[0] / shape[1])
    if 2 * len(ranked) - 1 > max_shapes:  # the square counts once, every other shape twice: landscape and portrait
        aspects = np.log([i / j for i, j in ranked])
        targets = np.linspace(0, aspects[-1], (max_shapes + 1) // 2)
        ranked = sorted({ranked[int(np.abs(aspects - target).argmin())] for target in targets})
    found = np.array(ranked, np.int64)
    return found[:, 0], found[:, 1]


@functools.cache
def _all_shapes(cells: int, max_shapes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the shapes to which images can be cropped, as two int64 arrays: the widths and the heights, in cells of 16
    x 16 pixels. Each number n from 1 to `cells` gives shapes with an area of at most n * n cells: each width from n
    upwards, with the greatest height that this area allows. For example, n = 4 allows 16 cells. It gives the shapes 4 x
    4, 5 x 3, 6 x 2, 7 x 2 and 8 x 2 (width x height). `max_shapes` limits the number of shapes for each n.

    The width is at most 8 times the height. So n = 4 does not give 9 x 1. The result joins the shapes of
    `_full_shapes(n, max_shapes)` for each n from 1 to `cells`. Each shape is returned once. For `max_shapes`, a shape
    that is not square counts twice, as landscape and as portrait.
    """
    sizes = [np.stack(_full_shapes(size, max_shapes)) for size in range(1, cells + 1)]
    found = np.unique(np.concatenate(sizes, axis=1), axis=1)
    return found[0], found[1]


# The table


def wanted_buckets(ctx: StageContext) -> pa.Table:
    """Return all rows that the table `buckets` should have, with all columns. `ctx` is the stage's context: its input
    tables and settings. There is one row per usable image and resolution. Rows that are stored already are included.
    Raises ValueError if no image is usable, or if the setting `where` is wrong or chooses no image.

    All rows are computed again, because this is cheap.
    """
    images = usable_rows(ctx.rows(IMAGES).select(["image_id", "path", "width", "height", "rejected", "use"]), references=True)
    sizes = {row["image_id"]: (row["width"], row["height"]) for row in images}
    rows = [row for image_id in sorted(sizes) for row in _rows(image_id, *sizes[image_id], ctx.config)]
    if ctx.config.where.strip():
        chosen = select_images(ctx.config.where, ctx.rows(IMAGES), ctx.rows(CHECKS)) | _only_references(ctx)
        rows = [row if row["image_id"] in chosen else row | {"rejected": "where"} for row in rows]
    return pa.Table.from_pylist(rows, schema=BUCKETS.batch)


def _only_references(ctx: StageContext) -> set[str]:
    """Return the image_ids of images that are used only as references. A reference is an image that the model sees
    beside the noisy image, in edit training. An image that is trained too is left out. `ctx` is the stage's context:
    its input tables and settings.
    """
    found = usable_rows(ctx.rows(IMAGES), references=True)
    return {row["image_id"] for row in found} - {row["image_id"] for row in found if row["use"] != USE}


def _rows(image_id: str, width: int, height: int, config: BucketsConfig) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table `buckets` for one image, as dicts. `image_id` is the image's key in the table, and
    `width` and `height` are its size in pixels. There is one row per resolution in `config`, the settings [buckets],
    the lowest first. The column `rejected` is "too_small" if the image has no bucket (trained size and crop) at this
    resolution. It is "same_crop" if a lower resolution gave the same bucket. Otherwise it is None.
    """
    seen = set()
    for resolution in sorted(config.resolutions):
        found = _cached_bucket(width, height, resolution, config.upscale, config.max_shapes)
        rejected = "too_small" if found is None else "same_crop" if found in seen else None
        seen.add(found)
        values = vars(found or Bucket(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0))
        yield {"image_id": image_id, "resolution": resolution, **values, "rejected": rejected}


_cached_bucket = functools.lru_cache(maxsize=65536)(choose_bucket)  # a folder holds many images of the same size


def write_buckets(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """Yield the rows in `ctx.pending` as record batches of at most `BATCH` rows. These rows of the table `buckets` are
    not stored yet. `wanted_buckets` has already computed all their columns.
    """
    yield from ctx.pending.select(BUCKETS.batch.names).to_batches(max_chunksize=BATCH)


def finish_buckets(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """Tell the user about the new rows of the table `buckets`, in one line per resolution. Each line gives the number
    of images used and the mean share that is cropped away. If the user stopped the run, nothing is printed. `ctx` is
    the stage's context: its tables and settings. The generator yields no rows.
    """
    if ctx.stop():
        return
    beside = _only_references(ctx)
    used = [row for row in ctx.pending.to_pylist() if row["rejected"] is None and row["image_id"] not in beside]
    if left_out := {row["image_id"] for row in ctx.pending.to_pylist() if row["rejected"] == "where"}:
        ctx.say(f"{len(left_out)} images are left out by buckets.where: {ctx.config.where}")
    for resolution in sorted({row["resolution"] for row in used}):
        ctx.say(_summary(resolution, [row for row in used if row["resolution"] == resolution]))
    yield from ()


def _summary(resolution: int, rows: list[dict[str, Any]]) -> str:
    """Return one line for the user about the images trained at `resolution`. It gives the number of images, the number
    of shapes and the mean share cropped away. `rows` are the rows of the table `buckets` for `resolution` that are not
    rejected. There must be at least one.

    The line also counts images with less than a quarter of `resolution` x `resolution` pixels, if there are any.
    """
    shapes = len({(row["width"], row["height"]) for row in rows})
    loss = sum(row["crop_loss"] for row in rows) / len(rows)
    small = sum(row["width"] * row["height"] < resolution**2 / 4 for row in rows)
    note = f"; {small} with less than a quarter of that area, at their own size" if small else ""
    return f"{resolution}: {len(rows)} images in {shapes} shapes, {loss:.1%} cropped away on average{note}"


STAGE = Stage(
    reads=(IMAGES,),
    optional=(CHECKS,),
    writes=BUCKETS,
    config=BucketsConfig,
    wants=wanted_buckets,
    run=write_buckets,
    finish=finish_buckets,
)
