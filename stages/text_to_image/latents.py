"""The stage `latents`: encode every crop of the stage `buckets`, and `jittered` ones, once; threads cut and resize ahead."""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
from collections import defaultdict, deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
import numpy as np
import pyarrow as pa
from PIL import Image

from schemas.text_to_image import BUCKETS, IMAGES, LATENTS
from stages.hashing import file_sha256
from stages.memory import Forecast, Memory, Outlook, Settings, cheapest
from stages.models.text.encoder import widen
from stages.run import Run
from stages.settings import Section, runtime, selects, setting
from stages.stage import Stage
from stages.text_to_image.imaging import masks, packed
from stages.text_to_image.imaging.decode import (
    BACKGROUND,
    CEILING_BYTES,
    MAX_BYTES,
    ROOM,
    ImageError,
    open_alpha,
    open_image,
    parse_colour,
    pixel_count,
)
from stages.text_to_image.imaging.usable import REFERENCE, usable_paths, usable_rows
from stages.text_to_image.memory import image_sizes, largest_image, smaller_sides
from stages.tuner import draws
from stages.tuner.blockwise.device import compute_exactly, configure_convolutions, live_memory_limit
from stages.untrusted import open_regular, read_bytes

if TYPE_CHECKING:
    from stages.models.family import Autoencoder

Row = dict[str, Any]
Crop = tuple[np.ndarray, bytes | None]  # pixels, uint8 (height, width, 3), and the mask, one byte per token, if there is one

CROP = ("crop_x", "crop_y", "crop_w", "crop_h")
WANTED = ("latent_id", "image_id", "width", "height", *CROP, "flip", "mask_id")
LANCZOS = Image.Resampling.LANCZOS
LATENT_ITEM = 2  # bytes of a stored value
ALPHA = "alpha"  # the mask_id of an image's own alpha channel: the image_id covers its content
MAY_HIDE_ALPHA = ("PNG", "GIF", "WEBP")  # formats with transparent pixels even in modes without an alpha channel


@dataclass(frozen=True)
class LatentsConfig(Section):
    flip: bool = selects(False, "encode a mirrored copy of every crop too; off, because text and faces are not symmetric")
    jitter: int = selects(
        0,
        "further crops of each image, a little smaller and moved at random; none for images with references",
        unit="crops",
        bounds=(0, 100),
    )
    jitter_share: float = selects(
        0.1,
        "jitter: largest share of a side by which a further crop is smaller, which enlarges its pixels",
        unit="share",
        bounds=(0.001, 0.5),
    )
    mask: Literal["none", "alpha", "file"] = selects(
        "none",
        "which part of an image is trained on: none: all of it; alpha: its opaque part; file: the white part of a mask file, "
        "cat.mask.png or masks/cat.png for cat.jpg",
    )
    background: str = setting(BACKGROUND, "colour behind transparent pixels, wherever pictures are read or shown")
    precision: Literal["float32", "bfloat16"] = setting(
        "float32", "dtype that the autoencoder computes in; bfloat16 needs half the memory and is less exact"
    )
    exact: bool = setting(
        True,
        "compute in full float32: no TF32 products and no Winograd convolutions, which some GPUs use by default",
        unrecorded=(True,),
    )
    batch_size: int = runtime(
        8, "rows per record batch, which a kill can lose; images are encoded one by one", unit="crops", bounds=(1, 1024)
    )
    workers: int = runtime(4, "threads that decode and resize images ahead of the autoencoder", unit="threads", bounds=(1, 64))

    def check(self) -> None:
        parse_colour(self.background)


# Which crops


def latent_id(row: Row) -> str:
    """The key of a latent: the sha256 of what is encoded. How it is encoded (background, precision) is in the recipe."""
    crop = [repr(float(row[name])) for name in CROP]
    parts = [row["image_id"], str(row["width"]), str(row["height"]), *crop, str(bool(row["flip"])).lower()]
    parts += [row["mask_id"]] if row.get("mask_id") else []
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


def wanted_latents(run: Run[LatentsConfig]) -> pa.Table:
    """One row per accepted bucket, jittered crop and mirror image of these. Raises ValueError as `mask_ids` does."""
    images = run.inputs.rows(IMAGES)
    mask_id = mask_ids(images, run.needs["image_folder"], run.config.mask)
    rows = images.to_pylist()
    shown = {row["reference_of"] for row in rows if row["reference_of"]}
    edited = {row["image_id"] for row in rows if row["use"] == REFERENCE or row["path"] in shown}
    wanted: dict[str, Row] = {}
    for bucket in run.inputs.rows(BUCKETS).to_pylist():
        if bucket["rejected"] is not None or bucket["image_id"] not in mask_id:
            continue
        # A crop moved at random would no longer show the same part as its references.
        count = 0 if bucket["image_id"] in edited else run.config.jitter
        crops = [bucket, *(jittered(bucket, n, run.config.jitter_share) for n in range(1, count + 1))]
        for crop, flip in itertools.product(crops, (False, True) if run.config.flip else (False,)):
            row = {name: crop[name] for name in WANTED if name in crop}
            row |= {"flip": flip, "mask_id": mask_id[bucket["image_id"]]}
            row["latent_id"] = latent_id(row)
            # Crops with equal keys share one row.
            wanted[row["latent_id"]] = row
    return LATENTS.select(list(wanted.values()), WANTED)


def foreseen_latents(run: Run[LatentsConfig]) -> pa.Table:
    """Of crops that are not encoded yet, what is known before, as if all could be."""
    step = run.needs["family"].architecture.pixels_per_token
    known = {row["latent_id"]: row for row in run.output.stored.to_pylist()}
    nothing: Row = {field.name: None for field in LATENTS.stored}

    def foreseen(row: Row) -> Row:
        grid = row["height"] // step, row["width"] // step
        mask = bytes([255]) * (grid[0] * grid[1]) if row["mask_id"] else None
        return nothing | row | {"shape": [1, *grid], "mask": mask}

    rows = [known.get(row["latent_id"]) or foreseen(row) for row in wanted_latents(run).to_pylist()]
    return pa.Table.from_pylist(rows, schema=pa.schema([field.with_nullable(True) for field in LATENTS.stored]))


def jittered(bucket: Row, number: int, share: float) -> Row:
    """A smaller crop inside that of `bucket`, with its aspect ratio and trained size; sides shrink by up to `share`."""
    # The draws depend on the image, the trained size and the number alone.
    name = f"jitter {bucket['image_id']} {bucket['width']}x{bucket['height']}"
    less, across, down = (draws.uniform(0, name, number, n) for n in range(3))
    width, height = (bucket[side] * (1 - share * less) for side in ("crop_w", "crop_h"))
    left = bucket["crop_x"] + across * (bucket["crop_w"] - width)
    top = bucket["crop_y"] + down * (bucket["crop_h"] - height)
    return {**bucket, "crop_x": left, "crop_y": top, "crop_w": width, "crop_h": height}


def mask_ids(images: pa.Table, folder: Path, mask: Literal["none", "alpha", "file"]) -> dict[str, str]:
    """mask_id of every usable image, references included: the sha256 of its mask file, "alpha", or "" for no mask."""
    usable = usable_rows(images, references=True)
    found = {row["image_id"]: "" for row in usable}
    if mask == "alpha":
        for row in usable:
            if "A" in row["mode"].upper() or row["format"] in MAY_HIDE_ALPHA:
                found[row["image_id"]] = ALPHA
    if mask != "file":
        return found
    files = mask_files(usable_paths(images), folder)
    if not files:
        path = usable[0]["path"]
        name = Path(path).stem
        raise ValueError(
            f'latents.mask is "file", but none of the {len(usable)} images has a mask file: for {path}, '
            f"write {name}.mask.png beside it, or masks/{name}.png"
        )
    for image_id, path in files.items():
        try:
            with open_regular(path, MAX_BYTES) as file:
                found[image_id] = file_sha256(file)
        except OSError as error:
            raise ValueError(f"the mask {path} cannot be read: {error.strerror or error}") from error
    return found


def mask_files(paths: dict[str, list[str]], folder: Path) -> dict[str, Path]:
    """Mask file by image_id: cat.mask.png or masks/cat.png for cat.jpg. Images without one are left out."""
    find = masks.mask_finder(folder)
    return {image_id: folder / path for image_id, names in paths.items() if (path := find(names))}


# Decoding


class FileChanged(Exception):  # noqa: N818  (the program did not fail)
    """An image or mask file has another sha256 than the recorded one, or can no longer be read."""


@dataclass(frozen=True)
class ImageJob:
    image_id: str
    path: Path
    rows: list[Row]  # the pending crops: the columns that are known before encoding
    mask: Path | None


def _jobs(run: Run[LatentsConfig]) -> list[ImageJob]:
    by_image: dict[str, list[Row]] = defaultdict(list)
    for row in run.output.pending.to_pylist():
        by_image[row["image_id"]].append(row)
    folder = run.needs["image_folder"]
    paths = usable_paths(run.inputs.rows(IMAGES), references=True)
    found = mask_files(paths, folder) if run.config.mask == "file" else {}
    return [ImageJob(image_id, folder / paths[image_id][0], rows, found.get(image_id)) for image_id, rows in by_image.items()]


def decode_ahead(jobs: list[ImageJob], background: str, workers: int) -> Iterator[tuple[ImageJob, Future[list[Crop]]]]:
    """(job, future of its crops) in order, at most `workers` + 1 images ahead. Closing the iterator waits for the threads."""
    waiting: deque[tuple[ImageJob, Future[list[Crop]]]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="decode") as pool:
        try:
            for job in jobs:
                waiting.append((job, pool.submit(decode_crops, job, background)))
                if len(waiting) > workers:
                    yield waiting.popleft()
            yield from waiting
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def decode_crops(job: ImageJob, background: str) -> list[Crop]:
    """One per row. Raises ImageError if image or mask cannot be used, and FileChanged if a file has changed."""
    data = _read_unchanged(job.path, job.image_id)
    with ROOM.taken(pixel_count(io.BytesIO(data))):
        image = open_image(io.BytesIO(data), background)
        mask = _read_mask(job, data, image)
        return [
            (np.asarray(masks.cut(image, image.size, row, 1, LANCZOS)), masks.token_mask(mask, image.size, row) if mask else None)
            for row in job.rows
        ]


def _read_mask(job: ImageJob, data: bytes, image: Image.Image) -> Image.Image | None:
    mask_id = job.rows[0]["mask_id"]
    if mask_id in ("", ALPHA):
        return open_alpha(io.BytesIO(data)) if mask_id else None
    # The row has the sha256 of a mask file, which is gone since.
    if job.mask is None:
        raise FileChanged(job.path.name)
    return masks.read_mask(job.mask, _read_unchanged(job.mask, mask_id), image)


def _read_unchanged(path: Path, sha256: str) -> bytes:
    try:
        data = packed.read_member(path) if packed.split(path) else read_bytes(path, CEILING_BYTES)
    except ValueError as error:
        raise FileChanged(str(error)) from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise FileChanged(path.name)
    return data


# Encoding


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
    """Complete rows of the pending crops. An image that has changed, or whose mask has, gives its name to `changed` instead."""
    done, total = 0, run.output.pending.num_rows
    run.report.progress(done, total, "crops")
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
            run.report.progress(done, total, "crops")


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


def opened_files(run: Run[LatentsConfig]) -> Iterator[Path]:
    for job in _jobs(run):
        yield packed.file_to_open(job.path)
        if job.mask:
            yield packed.file_to_open(job.mask)


def forecast(outlook: Outlook) -> Forecast:
    config, family, weights = outlook.sections["latents"], outlook.family, outlook.weights("autoencoder")
    architecture, item, (width, height) = family.architecture, getattr(mx, config.precision).size, largest_image(outlook)

    def memory(settings: Settings) -> Memory:
        sides = settings["buckets"]["resolutions"] * 2 if settings else (height, width)
        found: Memory = architecture.autoencoder_memory(weights, family, *sides, item, True, config.exact)
        return found

    def peak(settings: Settings) -> int:
        return memory(settings).footprint

    step = architecture.pixels_per_token
    changes = [{"buckets": {"resolutions": [side]}} for side in smaller_sides((width * height) ** 0.5, step)]
    channels = architecture.transformer_config(outlook.weights("transformer"), family).latent_channels
    sizes = image_sizes(outlook)
    row_bytes = LATENT_ITEM * channels * sum(width * height for width, height in sizes) // (step * step * len(sizes))
    how = f"images of at most {width} x {height} px"
    needed = memory({})
    remedy = functools.partial(cheapest, peak, outlook.budget, changes)
    return Forecast(needed.footprint, row_bytes, how=how, find_remedy=remedy, arrays=needed.peak, size=(width, height))


STAGE = Stage(
    reads=(BUCKETS, IMAGES),
    writes=LATENTS,
    unit="crop",
    config=LatentsConfig,
    needs=("image_folder", "family", "autoencoder"),
    wants=wanted_latents,
    foresee=foreseen_latents,
    run=encode_latents,
    forecast=forecast,
    opens=opened_files,
)
