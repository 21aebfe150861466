"""The stage `latents`: encode every crop once, while threads decode and resize images ahead of the autoencoder."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pyarrow as pa

from schemas.text_to_image import BUCKETS, IMAGES, LATENTS
from stages.memory import Forecast, Memory, Outlook, Settings, cheapest
from stages.models.text.encoder import widen
from stages.run import Run
from stages.stage import Stage
from stages.text_to_image.imaging import packed
from stages.text_to_image.imaging.decode import ImageError
from stages.text_to_image.imaging.usable import REFERENCE, usable_paths
from stages.text_to_image.latents.config import LatentsConfig
from stages.text_to_image.latents.crops import FileChanged, ImageJob, decode_ahead, mask_files, mask_ids
from stages.text_to_image.memory import image_sizes, largest_image, smaller_sides
from stages.tuner import draws
from stages.tuner.blockwise.device import compute_exactly, configure_convolutions, live_memory_limit

if TYPE_CHECKING:
    from stages.models.family import Autoencoder
    from stages.text_to_image.latents.crops import Crop


Row = dict[str, Any]

WANTED = ("latent_id", "image_id", "width", "height", "crop_x", "crop_y", "crop_w", "crop_h", "flip", "mask_id")
LATENT_ITEM = 2  # bytes of a stored value
CROP = ("crop_x", "crop_y", "crop_w", "crop_h")


def latent_id(row: Row) -> str:
    """The key of a latent: the sha256 of everything that its values depend on."""
    crop = [repr(float(row[name])) for name in CROP]
    parts = [row["image_id"], str(row["width"]), str(row["height"]), *crop, str(bool(row["flip"])).lower()]
    parts += [row["mask_id"]] if row.get("mask_id") else []
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


def wanted_latents(run: Run[LatentsConfig]) -> pa.Table:
    """One row per accepted bucket, jittered crop and mirror image of these. Raises ValueError if no image is usable, or masks
    are needed but missing or unreadable.
    """
    masks = mask_ids(run.inputs.rows(IMAGES), run.needs["image_folder"], run.config.mask)
    edited = with_references(run.inputs.rows(IMAGES))
    rows: dict[str, Row] = {}
    for bucket in run.inputs.rows(BUCKETS).to_pylist():
        if bucket["rejected"] is not None or bucket["image_id"] not in masks:
            continue
        # A crop moved at random would no longer show the same part as its references.
        count = 0 if bucket["image_id"] in edited else run.config.jitter
        crops = [bucket, *(jittered(bucket, n, run.config.jitter_share) for n in range(1, count + 1))]
        for crop, flip in itertools.product(crops, (False, True) if run.config.flip else (False,)):
            row = {name: crop[name] for name in WANTED if name in crop}
            row |= {"flip": flip, "mask_id": masks[bucket["image_id"]]}
            row["latent_id"] = latent_id(row)
            # Crops with equal keys share one row.
            rows[row["latent_id"]] = row
    return LATENTS.select(list(rows.values()), WANTED)


def jittered(bucket: Row, number: int, share: float) -> Row:
    """A smaller crop inside that of `bucket`, with its aspect ratio and trained size; sides shrink by up to `share`."""
    # The draws depend on the image, the trained size and the number alone.
    name = f"jitter {bucket['image_id']} {bucket['width']}x{bucket['height']}"
    less, across, down = (draws.uniform(0, name, number, n) for n in range(3))
    width, height = (bucket[side] * (1 - share * less) for side in ("crop_w", "crop_h"))
    left = bucket["crop_x"] + across * (bucket["crop_w"] - width)
    top = bucket["crop_y"] + down * (bucket["crop_h"] - height)
    return {**bucket, "crop_x": left, "crop_y": top, "crop_w": width, "crop_h": height}


def with_references(images: pa.Table) -> set[str]:
    """image_ids of edit training: images with references, and the references."""
    rows = images.select(["path", "image_id", "use", "reference_of"]).to_pylist()
    shown = {row["reference_of"] for row in rows if row["reference_of"]}
    return {row["image_id"] for row in rows if row["use"] == REFERENCE or row["path"] in shown}


def encode_latents(run: Run[LatentsConfig]) -> Iterator[pa.RecordBatch]:
    """Raises ValueError, after the last batch, if image files have changed since the table `images` was written."""
    if not run.output.pending.num_rows:
        return
    configure_convolutions()  # before the first MLX operation, as is the next
    if run.config.exact:
        compute_exactly()
    family = run.needs["family"]
    path, dtype = run.needs["autoencoder"], getattr(mx, run.config.precision)
    model = run.reuse(f"autoencoder in {dtype}", lambda: family.architecture.load_autoencoder(path, family, dtype))
    # Of the largest pending image. Without the limit, a GPU could start several strips of an image ahead of time, and hold them
    # all in memory.
    sizes = [(row["height"], row["width"]) for row in run.output.pending.to_pylist()]
    largest = max(sizes, key=lambda size: size[0] * size[1])
    limit = family.architecture.autoencoder_memory(path, family, *largest, dtype.size, True, run.config.exact).live
    changed: list[str] = []
    rows = _encoded_rows(run, model, changed)
    held: list[Row] = []
    try:
        with live_memory_limit(limit):
            for row in rows:
                held.append(row)
                stopping = run.report.stop()
                if stopping or len(held) == run.config.batch_size:
                    yield LATENTS.record_batch(held)
                    held = []
                    mx.clear_cache()
                if stopping:
                    return
            if held:
                yield LATENTS.record_batch(held)
    finally:
        rows.close()
        del rows, model
        mx.clear_cache()
    if changed:
        names = ", ".join(changed[:3])
        raise ValueError(f"{len(changed)} image files changed since the table images was written ({names}): run images again")


def _encoded_rows(run: Run[LatentsConfig], model: Any, changed: list[str]) -> Generator[Row]:
    """Complete rows of the pending crops. If an image or its mask has changed, it gives no rows and its name goes to
    `changed`.
    """
    done, total = 0, run.output.pending.num_rows
    run.report.progress(done, total, "images")
    for job, future in decode_ahead(_jobs(run), run.config.background, run.config.workers):
        try:
            crops = future.result()
        except FileChanged:
            changed.append(job.path.name)
            continue
        except ImageError as error:
            reason = str(error)
            rows = (rejected_row(row, reason) for row in job.rows)
        else:
            # One by one: a convolution over a batch may round differently than over one image, and a row must not depend on
            # other rows. At these sizes, one image keeps a device busy.
            rows = (encoded_row(model, row, crop) for row, crop in zip(job.rows, crops, strict=True))
        for row in rows:
            yield row
            done += 1
            run.report.progress(done, total, "images")


def encode(model: Autoencoder, pixels_HWC: np.ndarray) -> np.ndarray:
    """(channels, height / 16, width / 16), bfloat16 as uint16. `pixels_HWC`: uint8."""
    image_1HWC = mx.array(pixels_HWC)[None].astype(mx.float32) / 127.5 - 1.0
    return np.array(model.encode(image_1HWC)[0].astype(mx.bfloat16).view(mx.uint16))


def encoded_row(model: Autoencoder, row: Row, crop: Crop) -> Row:
    """The complete row of a crop; rejected if a value is not finite."""
    pixels_HWC, mask = crop
    words_Chw = encode(model, pixels_HWC)
    # Of the rounded values, as they are stored.
    values = widen(words_Chw).astype(np.float64)
    if not np.isfinite(values).all():
        return rejected_row(row, 'the autoencoder gave values that are not finite; try latents.precision = "float32"')
    return row | {
        "shape": list(words_Chw.shape),
        "dtype": "bfloat16",
        "mean": float(values.mean()),
        "std": float(values.std()),
        "absmax": float(np.abs(values).max()),
        "mask": mask,
        "rejected": None,
        "tensor": words_Chw.reshape(-1),
    }


def rejected_row(row: Row, reason: str) -> Row:
    empty = {"shape": [], "dtype": "bfloat16", "mean": 0.0, "std": 0.0, "absmax": 0.0, "mask": None}
    return row | empty | {"rejected": reason, "tensor": np.zeros(0, np.uint16)}


def _jobs(run: Run[LatentsConfig]) -> list[ImageJob]:
    by_image: dict[str, list[Row]] = {}
    for row in run.output.pending.to_pylist():
        by_image.setdefault(row["image_id"], []).append(row)
    folder = run.needs["image_folder"]
    paths = usable_paths(run.inputs.rows(IMAGES), references=True)
    masks = mask_files(paths, folder) if run.config.mask == "file" else {}
    return [ImageJob(image_id, folder / paths[image_id][0], rows, masks.get(image_id)) for image_id, rows in by_image.items()]


def opened_files(run: Run[LatentsConfig]) -> Iterator[Path]:
    """The files that encoding the pending crops opens: images, and masks if they are files."""
    for job in _jobs(run):
        yield packed.file_to_open(job.path)
        if job.mask:
            yield packed.file_to_open(job.mask)


def forecast(outlook: Outlook) -> Forecast:
    config, family, weights = outlook.sections["latents"], outlook.family, outlook.weights("autoencoder")
    architecture, item, (width, height) = family.architecture, getattr(mx, config.precision).size, largest_image(outlook)

    def peak(settings: Settings) -> int:
        sides = settings["buckets"]["resolutions"] * 2 if settings else (height, width)
        memory: Memory = architecture.autoencoder_memory(weights, family, *sides, item, True, config.exact)
        return memory.peak

    step = architecture.pixels_per_token
    changes = ({"buckets": {"resolutions": [side]}} for side in smaller_sides((width * height) ** 0.5, step))
    remedy = cheapest(peak, outlook.budget, changes)
    channels = architecture.transformer_config(outlook.weights("transformer"), family).in_channels
    sizes = image_sizes(outlook)
    row_bytes = LATENT_ITEM * channels * sum(width * height for width, height in sizes) // (step * step * len(sizes))
    how = f"images of at most {width} x {height} px"
    return Forecast(peak({}), row_bytes, how=how, remedy=remedy if peak({}) > outlook.budget else None)


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
