"""The stage `buckets`: at which size each image is trained, and which part of the image is used (the crop).

A size is counted in cells of 16 x 16 pixels, one cell per token of the transformer: the autoencoder shrinks 8 pixels to
1, and the transformer reads patches of 2 x 2. A shape is (i, j): i cells wide, j cells high.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.text_to_image import BUCKETS, CHECKS, IMAGES
from stages.run import Run
from stages.settings import Section, selects, setting, several
from stages.stage import Stage
from stages.text_to_image.imaging.usable import REFERENCE, usable_rows

STEP = 16  # pixels along one side of a cell
LONGEST = 8.0  # largest aspect ratio, long side over short side; a longer image is cropped to it
BATCH = 4096  # rows per record batch


@dataclass(frozen=True)
class BucketsConfig(Section):
    resolutions: tuple[int, ...] = selects(
        (512, 768),
        "resolutions R, pixels: every image is trained once per R, at an area of at most R x R",
        unit="pixels",
        bounds=(16, 4096),
    )
    upscale: bool = setting(False, "enlarge an image that has fewer than R x R pixels; otherwise it keeps its own size")
    max_shapes: int = setting(
        256,
        "shapes of full area per R, spread evenly over the aspect ratios; 256: all, up to R = 1024; 1: squares only",
        unit="shapes",
        bounds=(1, 10_000),
    )
    where: str = selects(
        "",
        'SQL condition on columns of checks and images that an image must meet: "blur < 0.5 and duplicate_of is null"; '
        "empty: all",
    )

    def check(self) -> None:
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
    width: int  # trained pixels, a multiple of 16
    height: int
    crop_x: float  # source pixels, possibly fractions
    crop_y: float
    crop_w: float
    crop_h: float
    scale: float  # trained pixels per source pixel
    crop_loss: float  # share of the image's area that is cropped away
    tokens: int


@functools.lru_cache(maxsize=65536)  # a folder holds many images of the same size
def choose_bucket(width: int, height: int, resolution: int, upscale: bool = False, max_shapes: int = 256) -> Bucket | None:
    """The size (at most `resolution`² pixels) and crop to train an image at; None: too small, and not to be enlarged.

    The shape of full area that crops least; if that would enlarge the image and `upscale` is False, the smaller shape
    with the least sum of two shares: of the image, cropped away; and of the pixels, given up.
    """
    if width < height:
        # Only landscape shapes are listed: a portrait image is turned.
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
    """The shape that crops least; with `area` (cells), least cropped share + unused share of `area`. The largest of equals."""
    skew = (i * height) / (j * width)
    loss = 1 - np.minimum(skew, 1 / skew)
    if area is not None:
        loss = loss + 1 - i * j / area
    # Rounded, so that equally good shapes compare as equal.
    best = int(np.lexsort((-i * j, np.round(loss, 12)))[0])
    return int(i[best]), int(j[best])


def _make_bucket(width: int, height: int, i: int, j: int) -> Bucket:
    across, down = i * STEP, j * STEP
    # One side is used in full; the other is cropped equally at both ends.
    if across * height >= down * width:
        crop_w, crop_h, scale = float(width), min(float(height), width * down / across), across / width
    else:
        crop_w, crop_h, scale = min(float(width), height * across / down), float(height), down / height
    kept = (crop_w / width) * (crop_h / height)
    return Bucket(across, down, (width - crop_w) / 2, (height - crop_h) / 2, crop_w, crop_h, scale, 1 - kept, i * j)


@functools.cache
def _full_shapes(cells: int, max_shapes: int) -> tuple[np.ndarray, np.ndarray]:
    """Widths and heights (int64, width >= height) of shapes whose height cannot grow within `cells`² cells, narrowest first."""
    full = {(i, cells * cells // i) for i in range(1, cells * cells + 1)}
    full = {(max(shape), min(shape)) for shape in full if max(shape) <= LONGEST * min(shape)}
    ranked = sorted(full, key=lambda shape: shape[0] / shape[1])
    if 2 * len(ranked) - 1 > max_shapes:  # the square counts once, every other shape twice: landscape and portrait
        # What remains is spread evenly over the logarithm of the aspect ratio.
        aspects = np.log([i / j for i, j in ranked])
        targets = np.linspace(0, aspects[-1], (max_shapes + 1) // 2)
        ranked = sorted({ranked[int(np.abs(aspects - target).argmin())] for target in targets})
    found = np.array(ranked, np.int64)
    return found[:, 0], found[:, 1]


@functools.cache
def _all_shapes(cells: int, max_shapes: int) -> tuple[np.ndarray, np.ndarray]:
    sizes = [np.stack(_full_shapes(size, max_shapes)) for size in range(1, cells + 1)]
    found = np.unique(np.concatenate(sizes, axis=1), axis=1)
    return found[0], found[1]


# The table


def wanted_buckets(run: Run[BucketsConfig]) -> pa.Table:
    """Raises ValueError if no image is usable, or if `where` is wrong or chooses none."""
    condition = run.config.where
    if condition.strip():  # before the table checks is there
        _meeting(condition, IMAGES.stored.empty_table(), CHECKS.stored.empty_table())
    images = usable_rows(run.inputs.rows(IMAGES), references=True)
    sizes = {row["image_id"]: (row["width"], row["height"]) for row in images}
    # All rows, also stored ones: this is cheap.
    rows = [row for image_id in sorted(sizes) for row in _rows(image_id, *sizes[image_id], run.config)]
    if condition.strip():
        chosen = select_images(condition, run.inputs.rows(IMAGES), run.inputs.rows(CHECKS)) | _only_references(run)
        rows = [row if row["image_id"] in chosen else row | {"rejected": "where"} for row in rows]
    return pa.Table.from_pylist(rows, schema=BUCKETS.batch)


def select_images(condition: str, images: pa.Table, checks: pa.Table) -> set[str]:
    """The image_ids that meet `condition`. Raises ValueError if it is no valid SQL, reads a file, or none meets it."""
    found, usable = _meeting(condition, images, checks), {row["image_id"] for row in usable_rows(images)}
    if not found & usable:
        raise ValueError(f'buckets.where: none of the {len(usable)} images meets "{condition}"; see latentmill lint')
    return found


def _meeting(condition: str, images: pa.Table, checks: pa.Table) -> set[str]:
    import duckdb

    # The condition may come from someone else's project.toml: no files, no extensions, and no way to allow them again.
    settings: dict[str, str | bool | int | float | list[str]] = {
        "enable_external_access": "false",
        "autoinstall_known_extensions": "false",
        "lock_configuration": "true",
    }
    shared = [name for name in checks.column_names if name in images.column_names and name != "image_id"]
    with duckdb.connect(":memory:", config=settings) as connection:
        connection.register("images", images)
        connection.register("checks", checks.drop_columns(shared))
        try:
            # The newline ends a `--` comment in the condition.
            query = f"select image_id from images join checks using (image_id) where rejected is null and ({condition}\n)"
            return {row[0] for row in connection.execute(query).fetchall()}
        except duckdb.Error as error:
            words = " ".join(str(error).split("LINE ")[0].split())
            raise ValueError(f'buckets.where must be an SQL condition such as "blur < 0.6", got "{condition}": {words}') from None


def _only_references(run: Run[BucketsConfig]) -> set[str]:
    found = usable_rows(run.inputs.rows(IMAGES), references=True)
    return {row["image_id"] for row in found} - {row["image_id"] for row in found if row["use"] != REFERENCE}


def _rows(image_id: str, width: int, height: int, config: BucketsConfig) -> Iterator[dict[str, Any]]:
    seen = set()
    for resolution in sorted(config.resolutions):
        found = choose_bucket(width, height, resolution, config.upscale, config.max_shapes)
        # A small image gets the same crop at several resolutions: it is trained once.
        rejected = "too_small" if found is None else "same_crop" if found in seen else None
        seen.add(found)
        values = vars(found or Bucket(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0))
        yield {"image_id": image_id, "resolution": resolution, **values, "rejected": rejected}


def write_buckets(run: Run[BucketsConfig]) -> Iterator[pa.RecordBatch]:
    yield from run.output.pending.select(BUCKETS.batch.names).to_batches(max_chunksize=BATCH)


def finish_buckets(run: Run[BucketsConfig]) -> Iterator[pa.RecordBatch]:
    if run.report.stop():
        return
    # References are not trained at these sizes, only seen.
    beside = _only_references(run)
    used = [row for row in run.output.pending.to_pylist() if row["rejected"] is None and row["image_id"] not in beside]
    if left_out := {row["image_id"] for row in run.output.pending.to_pylist() if row["rejected"] == "where"}:
        run.report.say(f"{several(len(left_out), 'image')} left out by buckets.where: {run.config.where}")
    for resolution in sorted({row["resolution"] for row in used}):
        rows = [row for row in used if row["resolution"] == resolution]
        shapes = len({(row["width"], row["height"]) for row in rows})
        loss = sum(row["crop_loss"] for row in rows) / len(rows)
        small = sum(row["width"] * row["height"] < resolution**2 / 4 for row in rows)
        note = f"; {small} with less than a quarter of that area, at their own size" if small else ""
        run.report.say(
            f"{resolution}: {several(len(rows), 'image')} in {several(shapes, 'shape')}, {loss:.1%} cropped away on average{note}"
        )
    yield from ()


STAGE = Stage(
    reads=(IMAGES,),
    optional=(CHECKS,),
    writes=BUCKETS,
    unit="crop",
    config=BucketsConfig,
    wants=wanted_buckets,
    foresee=wanted_buckets,
    run=write_buckets,
    finish=finish_buckets,
)
