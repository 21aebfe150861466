"""The stage `latents`: encode every crop with the autoencoder, once. Threads decode and resize images ahead of the
autoencoder.

Images are encoded one by one: a convolution over a batch may round differently than over one image, and a row must not
depend on other rows. At these sizes, one image keeps a device busy.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from schemas.text_to_image.buckets import BUCKETS
from schemas.text_to_image.images import IMAGES
from schemas.text_to_image.latents import LATENTS
from stages.stage import Stage, StageContext
from stages.text_to_image.imaging import packed
from stages.text_to_image.imaging.decode import ImageError
from stages.text_to_image.imaging.references import USE
from stages.text_to_image.imaging.usable import usable_paths
from stages.text_to_image.latents.config import LatentsConfig
from stages.text_to_image.latents.crop import FileChanged, ImageJob, decode_ahead
from stages.text_to_image.latents.mask_ids import mask_files, mask_ids
from stages.text_to_image.latents.memory_plan import ITEMSIZES, forecast
from stages.tuner import draws

Row = dict[str, Any]

WANTED = ("latent_id", "image_id", "width", "height", "crop_x", "crop_y", "crop_w", "crop_h", "flip", "mask_id")
CROP = ("crop_x", "crop_y", "crop_w", "crop_h")


def latent_id(row: Row) -> str:
    """Return the key of a latent, a sha256 in hex digits. It covers everything that the latent's values depend on. `row`
    holds `image_id`, `width`, `height`, `crop_x`, `crop_y`, `crop_w`, `crop_h` and `flip`. `mask_id` is optional.
    """
    crop = [repr(float(row[name])) for name in CROP]
    parts = [row["image_id"], str(row["width"]), str(row["height"]), *crop, str(bool(row["flip"])).lower()]
    parts += [row["mask_id"]] if row.get("mask_id") else []
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


def wanted_latents(ctx: StageContext) -> pa.Table:
    """Return a table with one row for each latent that the table `latents` should have. `ctx` is the stage's context:
    its input tables and settings. The columns are `WANTED`: the key `latent_id`, the image, its crop (the part that is
    trained) and its mask. There is one row per accepted row of the table `buckets`. Raises ValueError if no image is
    usable, or if mask files are needed but missing or unreadable.

    With [latents] `jitter`, there are further rows for smaller crops. Images of edit training have none. With [latents]
    `flip`, each crop has a second row for its mirror image. Crops with equal keys share one row. Crops of unusable
    images are left out.
    """
    masks = mask_ids(ctx.rows(IMAGES), ctx.need("image_folder"), ctx.config.mask)
    edited = with_references(ctx.rows(IMAGES))
    rows: dict[str, Row] = {}
    for bucket in ctx.rows(BUCKETS).to_pylist():
        if bucket["rejected"] is not None or bucket["image_id"] not in masks:
            continue
        count = 0 if bucket["image_id"] in edited else ctx.config.jitter
        crops = [bucket, *(jittered(bucket, n, ctx.config.jitter_share) for n in range(1, count + 1))]
        for crop, flip in itertools.product(crops, (False, True) if ctx.config.flip else (False,)):
            row = {name: crop[name] for name in WANTED if name in crop}
            row |= {"flip": flip, "mask_id": masks[bucket["image_id"]]}
            row["latent_id"] = latent_id(row)
            rows[row["latent_id"]] = row
    return pa.Table.from_pylist(list(rows.values()), schema=pa.schema([LATENTS.batch.field(name) for name in WANTED]))


def jittered(bucket: Row, number: int, share: float) -> Row:
    """Return a copy of a row of the table `buckets` with a smaller crop (part of the image that is trained). `bucket`
    is the row. Its crop contains the smaller crop. Both sides of the crop shrink by the same random fraction, from 0 to
    `share`, such as 0.1. `number` counts the smaller crops of a row, from 1. The random values depend only on the
    image, the trained size and `number`.

    The aspect ratio stays the same. So does the trained size, to which the crop is resized.
    """
    name = f"jitter {bucket['image_id']} {bucket['width']}x{bucket['height']}"
    less, across, down = (draws.uniform(0, name, number, n) for n in range(3))
    width, height = (bucket[side] * (1 - share * less) for side in ("crop_w", "crop_h"))
    left = bucket["crop_x"] + across * (bucket["crop_w"] - width)
    top = bucket["crop_y"] + down * (bucket["crop_h"] - height)
    return {**bucket, "crop_x": left, "crop_y": top, "crop_w": width, "crop_h": height}


def with_references(images: pa.Table) -> set[str]:
    """Return the image_ids of the images that take part in edit training: images with reference images, and the references.
    `images` is the table `images`.
    """
    rows = images.select(["path", "image_id", "use", "reference_of"]).to_pylist()
    shown = {row["reference_of"] for row in rows if row["reference_of"]}
    return {row["image_id"] for row in rows if row["use"] == USE or row["path"] in shown}


def encode_latents(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """Encode the crops (parts of images) that have no row in the table `latents` yet. Yield their rows as record
    batches of at most [latents] `batch_size` rows. `ctx` is the stage's context: its tables and settings. If an image
    cannot be decoded, its rows say why in the column `rejected`. Raises ValueError, after the last batch, if image
    files have changed since the table `images` was written.
    """
    if not ctx.pending.num_rows:
        return
    import mlx.core as mx

    from stages.text_to_image.latents.encode import record_batch
    from stages.tuner.blockwise.device import compute_exactly, configure_convolutions, live_memory_limit

    configure_convolutions()  # before the first MLX operation, as is the next
    if ctx.config.exact:
        compute_exactly()
    family = ctx.need("family")
    path, dtype = ctx.need("autoencoder"), getattr(mx, ctx.config.precision)
    model = ctx.reuse("autoencoder", lambda: family.architecture.load_autoencoder(path, family, dtype))
    limit = live_bytes(ctx)
    changed: list[str] = []
    rows = _encoded_rows(ctx, model, changed)
    held: list[Row] = []
    try:
        with live_memory_limit(limit):
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


def live_bytes(ctx: StageContext) -> int:
    """Return the memory limit for encoding the pending images, in bytes. The limit is the estimated peak memory for the
    largest pending image. `ctx` is the stage's context, which holds the pending rows and settings.

    The limit is for MLX. When MLX uses this much memory, it waits for running work to end before it starts more.
    Without the limit, a GPU could start several strips of an image ahead of time, and hold them all in memory.
    """
    family = ctx.need("family")
    width, height = max(((row["width"], row["height"]) for row in ctx.pending.to_pylist()), key=lambda size: size[0] * size[1])
    item = ITEMSIZES[ctx.config.precision]
    path, exact = ctx.need("autoencoder"), ctx.config.exact
    held, work = family.architecture.autoencoder_bytes(path, family, height, width, item, True, exact)
    return int(held + work)


def _encoded_rows(ctx: StageContext, model: Any, changed: list[str]) -> Generator[Row]:
    """Encode the pending crops (parts of images without a stored latent), and yield one complete row of the table
    `latents` per crop. `ctx` is the stage's context: its tables and settings. `model` is the autoencoder. `changed` is
    a list that this function extends. If an image or mask file has changed since the table `images` was written, its
    image gives no rows. The image's file name is then appended to `changed`.
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
    """Return one `ImageJob` for each image with pending crops (parts to encode). A job holds the image's path, its
    pending rows and its mask file. Jobs are in the order in which the images first appear in the pending rows. `ctx` is
    the stage's context: its tables and settings.
    """
    by_image: dict[str, list[Row]] = {}
    for row in ctx.pending.to_pylist():
        by_image.setdefault(row["image_id"], []).append(row)
    folder = ctx.need("image_folder")
    paths = usable_paths(ctx.rows(IMAGES), references=True)
    masks = mask_files(paths, folder) if ctx.config.mask == "file" else {}
    return [ImageJob(image_id, folder / paths[image_id][0], rows, masks.get(image_id)) for image_id, rows in by_image.items()]


def opened_files(ctx: StageContext) -> Iterator[Path]:
    """Yield the paths of the images and masks that the stage will open. These are the images with crops still to be
    encoded, and their masks. A crop is the part of an image that is trained. `ctx` is the stage's context, which holds
    the pending rows.
    """
    for job in _jobs(ctx):
        yield packed.file_to_open(job.path)
        if job.mask:
            yield packed.file_to_open(job.mask)


STAGE = Stage(
    reads=(BUCKETS, IMAGES),
    writes=LATENTS,
    config=LatentsConfig,
    needs=("image_folder", "family", "autoencoder"),
    wants=wanted_latents,
    run=encode_latents,
    forecast=forecast,
    opens=opened_files,
)
