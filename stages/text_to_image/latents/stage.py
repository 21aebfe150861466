"""The stage `latents`: encode every crop with the autoencoder, once. Threads decode and resize images ahead of the
autoencoder.

Images are encoded one by one: a convolution over a batch may round differently than over one image, and a row must not
depend on other rows. At these sizes, one image keeps a device busy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from schemas.text_to_image.buckets import BUCKETS
from schemas.text_to_image.images import IMAGES
from schemas.text_to_image.latents import LATENTS
from stages.settings import require, runtime, selects, setting
from stages.stage import Stage, StageContext
from stages.text_to_image.imaging.colour import parse_colour
from stages.text_to_image.imaging.decode import ImageError
from stages.text_to_image.imaging.usable import usable_paths
from stages.text_to_image.latents.crop import FileChanged, ImageJob, decode_ahead
from stages.text_to_image.latents.mask_ids import mask_files, mask_ids

Row = dict[str, Any]

WANTED = ("latent_id", "image_id", "width", "height", "crop_x", "crop_y", "crop_w", "crop_h", "flip", "mask_id")
CROP = ("crop_x", "crop_y", "crop_w", "crop_h")


@dataclass(frozen=True)
class LatentsConfig:
    """The section [latents] of project.toml: how crops are encoded, and where masks are taken from."""

    flip: bool = selects(False, "encode a mirrored copy of every crop too; off, because text and faces are not symmetric")
    mask: Literal["none", "alpha", "file"] = selects(
        "none",
        "which part of an image is trained on: none: all of it; alpha: its opaque part; file: the white part of a mask file, "
        "cat.mask.png or masks/cat.png for cat.jpg",
    )
    background: str = setting("#ffffff", "colour behind transparent pixels")
    precision: Literal["float32", "bfloat16"] = setting(
        "float32", "dtype that the autoencoder computes in; bfloat16 needs half the memory and is less exact"
    )
    batch_size: int = runtime(8, "rows per record batch, which a kill can lose; images are encoded one by one")
    workers: int = runtime(4, "threads that decode and resize images ahead of the autoencoder")

    def __post_init__(self) -> None:
        require(self, "batch_size", 1)
        require(self, "workers", 1)
        parse_colour(self.background)


def latent_id(row: Row) -> str:
    """Return the key of a latent, a sha256 in hex digits. It covers everything that the latent's values depend on. `row`
    holds `image_id`, `width`, `height`, `crop_x`, `crop_y`, `crop_w`, `crop_h` and `flip`. `mask_id` is optional.
    """
    crop = [repr(float(row[name])) for name in CROP]
    parts = [row["image_id"], str(row["width"]), str(row["height"]), *crop, str(bool(row["flip"])).lower()]
    parts += [row["mask_id"]] if row.get("mask_id") else []
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


def wanted_latents(ctx: StageContext) -> pa.Table:
    """Return the key and the crop of every latent that the table `latents` should have. The crops come from the table
    `buckets`, without rejected rows and unusable images. If [latents] `flip` is on, each crop has a second row for its
    mirror image. Crops with equal keys share one row. Raises ValueError if no image is usable or if a mask file cannot
    be read. Also raises ValueError if [latents] `mask` is "file" and no image has a mask file.
    """
    masks = mask_ids(ctx.rows(IMAGES), ctx.need("image_folder"), ctx.config.mask)
    rows: dict[str, Row] = {}
    for bucket in ctx.rows(BUCKETS).to_pylist():
        if bucket["rejected"] is not None or bucket["image_id"] not in masks:
            continue
        for flip in (False, True) if ctx.config.flip else (False,):
            row = {name: bucket[name] for name in WANTED if name in bucket}
            row |= {"flip": flip, "mask_id": masks[bucket["image_id"]]}
            row["latent_id"] = latent_id(row)
            rows[row["latent_id"]] = row
    return pa.Table.from_pylist(list(rows.values()), schema=pa.schema([LATENTS.batch.field(name) for name in WANTED]))


def encode_latents(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """Encode the pending crops and yield their rows as record batches of [latents] `batch_size` rows. An image that
    cannot be decoded gives rejected rows. Raises ValueError, after the last batch, if image files have changed since the
    table `images` was written.
    """
    if not ctx.pending.num_rows:
        return
    import mlx.core as mx

    from stages.text_to_image.latents.encode import record_batch

    family = ctx.need("family")
    model = family.architecture.load_autoencoder(ctx.need("autoencoder"), family, getattr(mx, ctx.config.precision))
    changed: list[str] = []
    rows = _encoded_rows(ctx, model, changed)
    held: list[Row] = []
    try:
        for row in rows:
            held.append(row)
            stopping = ctx.stop()
            if stopping or len(held) == ctx.config.batch_size:
                yield record_batch(held)
                held = []
                mx.clear_cache()
            if stopping:
                return
        if held:
            yield record_batch(held)
    finally:
        rows.close()
        del rows, model
        mx.clear_cache()
    if changed:
        names = ", ".join(changed[:3])
        raise ValueError(f"{len(changed)} image files changed since the table images was written ({names}): run images again")


def _encoded_rows(ctx: StageContext, model: Any, changed: list[str]) -> Generator[Row]:
    """Yield one complete row of the table `latents` per pending crop. `model` is the autoencoder. The rows of one image
    come together, so that each image is decoded once. If an image file has changed since the table `images` was written,
    it gives no rows. Its name is then appended to `changed`.
    """
    from stages.text_to_image.latents.encode import encoded_row, rejected_row

    done, total = 0, ctx.pending.num_rows
    ctx.progress(done, total, "images")
    for job, future in decode_ahead(_jobs(ctx), ctx.config.background, ctx.config.workers):
        try:
            crops = future.result()
        except FileChanged:
            changed.append(job.path.name)
            continue
        except ImageError as error:
            reason = str(error)
            rows = (rejected_row(row, reason) for row in job.rows)
        else:
            rows = (encoded_row(model, row, crop) for row, crop in zip(job.rows, crops, strict=True))
        for row in rows:
            yield row
            done += 1
            ctx.progress(done, total, "images")


def _jobs(ctx: StageContext) -> list[ImageJob]:
    """Return one job per image that has pending crops, in the order of the pending rows."""
    by_image: dict[str, list[Row]] = {}
    for row in ctx.pending.to_pylist():
        by_image.setdefault(row["image_id"], []).append(row)
    folder = ctx.need("image_folder")
    paths = usable_paths(ctx.rows(IMAGES))
    masks = mask_files(paths, folder) if ctx.config.mask == "file" else {}
    return [ImageJob(image_id, folder / paths[image_id][0], rows, masks.get(image_id)) for image_id, rows in by_image.items()]


STAGE = Stage(
    reads=(BUCKETS, IMAGES),
    writes=LATENTS,
    config=LatentsConfig,
    needs=("image_folder", "family", "autoencoder"),
    wants=wanted_latents,
    run=encode_latents,
)
