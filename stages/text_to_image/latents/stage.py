"""latents: every crop through the autoencoder, once. Threads decode, crop and resize ahead while it works.

Each image is encoded by itself: a convolution over a batch may round otherwise than over one image, and a row must not
depend on its neighbours. At these sizes one image fills a device anyway.

C channels (128)   h, w = height / 16, width / 16
"""

from __future__ import annotations

import hashlib
import io
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import pyarrow as pa
from PIL import Image, ImageOps

from schemas.text_to_image.buckets import BUCKETS
from schemas.text_to_image.images import IMAGES
from schemas.text_to_image.latents import LATENTS
from stages.models.flux2.autoencoder import Autoencoder
from stages.models.flux2.load import load_autoencoder
from stages.settings import runtime, selects, setting
from stages.stage import Stage, StageContext
from stages.text_to_image.imaging import masks
from stages.text_to_image.imaging.decode import ImageError, open_alpha, open_image

Row = dict[str, Any]

PRECISIONS = ("float32", "bfloat16")
WANTED = ("latent_id", "image_id", "width", "height", "crop_x", "crop_y", "crop_w", "crop_h", "flip", "mask_id")
ALPHA = "alpha"  # the mask_id of an image's own alpha channel, which its image_id covers
HIDES_ALPHA = ("PNG", "GIF", "WEBP")  # formats in which a mode without an alpha channel may still have transparent pixels


@dataclass(frozen=True)
class LatentsConfig:
    """Section [latents]."""

    flip: bool = selects(False, "a mirrored copy of every crop as extra rows; off: text and faces are not symmetric")
    mask: Literal["none", "alpha", "file"] = selects(
        "none", "what says which part is trained: the image's alpha channel, or a file beside it, cat.mask.png or masks/cat.png"
    )
    background: str = setting("#ffffff", "colour behind transparent pixels")
    precision: str = setting("float32", "what the autoencoder computes in; bfloat16 halves its memory and is less exact")
    batch_size: int = runtime(8, "rows handed over at once; what a kill can lose. Every image is encoded by itself")
    workers: int = runtime(4, "threads that decode and resize ahead of the autoencoder")

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"latents.precision = {self.precision!r} must be one of {', '.join(PRECISIONS)}")
        for name in ("batch_size", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"latents.{name} = {getattr(self, name)} must be at least 1")


class Changed(Exception):  # noqa: N818  (no failure of the program)
    """A file is not what it was when the table images was written."""


def latent_id(row: Row) -> str:
    """The key: sha256 over everything of the crop that the values depend on."""
    crop = [repr(float(row[name])) for name in ("crop_x", "crop_y", "crop_w", "crop_h")]
    parts = [row["image_id"], str(row["width"]), str(row["height"]), *crop, str(bool(row["flip"])).lower()]
    parts += [row["mask_id"]] if row.get("mask_id") else []
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


def wanted_latents(ctx: StageContext) -> pa.Table:
    """One row per usable crop, and its mirror image where that is asked for; equal crops are one row."""
    mask_ids = _mask_ids(ctx)
    crops: dict[str, Row] = {}
    for bucket in ctx.rows(BUCKETS).to_pylist():
        if bucket["rejected"] is not None or bucket["image_id"] not in mask_ids:
            continue
        for flip in (False, True) if ctx.config.flip else (False,):
            row = {name: bucket[name] for name in WANTED if name in bucket}
            row |= {"flip": flip, "mask_id": mask_ids[bucket["image_id"]]}
            row["latent_id"] = latent_id(row)
            crops[row["latent_id"]] = row
    return pa.Table.from_pylist(list(crops.values()), schema=pa.schema([LATENTS.batch.field(name) for name in WANTED]))


def _mask_ids(ctx: StageContext) -> dict[str, str]:
    """The mask of every usable image by the id of its content; "" for none. ValueError if masks are wanted and none is there."""
    rows = [row for row in ctx.rows(IMAGES).to_pylist() if row["rejected"] is None]
    if ctx.config.mask == "none":
        return {row["image_id"]: "" for row in rows}
    if ctx.config.mask == "alpha":
        clear = {row["image_id"]: "A" in row["mode"].upper() or row["format"] in HIDES_ALPHA for row in rows}
        return {image_id: ALPHA if there else "" for image_id, there in clear.items()}
    files = _mask_files(ctx)
    if rows and not files:
        name = Path(rows[0]["path"]).stem
        raise ValueError(
            f'latents.mask = "file", but none of the {len(rows)} images has one: {name}.mask.png beside it, or masks/{name}.png'
        )
    return {
        row["image_id"]: hashlib.sha256(_bytes(files[row["image_id"]])).hexdigest() if row["image_id"] in files else ""
        for row in rows
    }


def _mask_files(ctx: StageContext) -> dict[str, Path]:
    """image_id -> its mask file, for every usable image that has one under any of its names."""
    names: dict[str, list[str]] = {}
    for row in sorted(ctx.rows(IMAGES).to_pylist(), key=lambda row: (row["rejected"] is not None, row["path"])):
        if row["rejected"] in (None, "duplicate"):
            names.setdefault(row["image_id"], []).append(row["path"])
    find = masks.mask_finder(ctx.need("image_folder"))
    return {image_id: ctx.need("image_folder") / path for image_id, paths in names.items() if (path := find(paths))}


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"the mask {path} cannot be read: {error.strerror or error}") from error


def encode_latents(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """Encode what is pending. Files that changed since `images` read them are named at the end; the rest is kept."""
    if not ctx.pending.num_rows:
        return
    dtype = mx.float32 if ctx.config.precision == "float32" else mx.bfloat16
    model = load_autoencoder(ctx.need("autoencoder"), ctx.need("family"), dtype)
    changed: list[str] = []
    rows = _encoded(ctx, model, changed)
    try:
        held: list[Row] = []
        for row in rows:
            held.append(row)
            if len(held) == ctx.config.batch_size or ctx.stop():
                yield _batch(held)
                held = []
                mx.clear_cache()
                if ctx.stop():
                    return
        if held:
            yield _batch(held)
    finally:
        rows.close()
        del rows, model
        mx.clear_cache()
    if changed:
        raise ValueError(
            f"{len(changed)} image files changed since the table images was written ({', '.join(changed[:3])}): run it again"
        )


def _encoded(ctx: StageContext, model: Autoencoder, changed: list[str]) -> Generator[Row]:
    """A row per pending crop, all crops of an image together, so that it is decoded once."""
    by_image: dict[str, list[Row]] = {}
    for row in ctx.pending.to_pylist():
        by_image.setdefault(row["image_id"], []).append(row)
    paths = _paths(ctx)
    files = _mask_files(ctx) if ctx.config.mask == "file" else {}
    folder = ctx.need("image_folder")
    jobs = [Job(image_id, folder / paths[image_id], crops, files.get(image_id)) for image_id, crops in by_image.items()]
    done, total = 0, ctx.pending.num_rows
    ctx.progress(done, total, "images")
    for job, future in _ahead(jobs, ctx.config.background, ctx.config.workers):
        try:
            pixels = future.result()
        except Changed:
            changed.append(job.path.name)
            continue
        except ImageError as error:
            reason = str(error)
            finished = (_rejected(row, reason) for row in job.crops)
        else:
            finished = (
                _row(row, encode(model, pixels_HWC), mask) for row, (pixels_HWC, mask) in zip(job.crops, pixels, strict=True)
            )
        for row in finished:
            yield row
            done += 1
            ctx.progress(done, total, "images")


Cut = tuple[np.ndarray, bytes | None]  # a crop's pixels, and its mask by tokens


@dataclass(frozen=True)
class Job:
    """An image to be decoded, and what to cut from it; `mask` is the file that masks it, if one does."""

    image_id: str
    path: Path
    crops: list[Row]
    mask: Path | None


def _ahead(jobs: list[Job], background: str, workers: int) -> Iterator[tuple[Job, Future[list[Cut]]]]:
    """The jobs in order, each with its crops on the way; a bounded number is decoded before it is asked for."""
    waiting: deque[tuple[Job, Future[list[Cut]]]] = deque()
    todo = iter(jobs)
    with ThreadPoolExecutor(workers, thread_name_prefix="decode") as pool:
        try:
            while True:
                while len(waiting) <= workers and (job := next(todo, None)):
                    waiting.append((job, pool.submit(crops_of, job, background)))
                if not waiting:
                    return
                yield waiting.popleft()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def crops_of(job: Job, background: str) -> list[Cut]:
    """An image's crops, resized, with their masks. Raises ImageError for a bad file, Changed for another file."""
    data = _unchanged(job.path, job.image_id)
    image = open_image(io.BytesIO(data), background)
    mask = _mask(job, data, image)
    return [(cut(image, row), masks.token_mask(mask, image.size, row) if mask else None) for row in job.crops]


def _mask(job: Job, data: bytes, image: Image.Image) -> Image.Image | None:
    """The mask of the whole image; all crops of an image have the same one."""
    mask_id = job.crops[0]["mask_id"]
    if mask_id in ("", ALPHA):
        return open_alpha(io.BytesIO(data)) if mask_id else None
    if job.mask is None:
        raise Changed(job.path.name)
    mask = masks.read_mask(job.mask, _unchanged(job.mask, mask_id))
    if not masks.same_shape(mask, image):
        sizes = f"{mask.width} x {mask.height}, the image {image.width} x {image.height}"
        raise ImageError("mask", f"{job.mask.name} is {sizes}: another shape")
    return mask


def _unchanged(path: Path, digest: str) -> bytes:
    """A file's bytes, if they are still those of that sha256."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Changed(str(error)) from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise Changed(path.name)
    return data


def cut(image: Image.Image, row: Row) -> np.ndarray:
    """One crop at its bucket's size. Lanczos straight from the source pixels: no reduction before it."""
    left, top = max(0.0, row["crop_x"]), max(0.0, row["crop_y"])
    right = min(float(image.width), row["crop_x"] + row["crop_w"])
    bottom = min(float(image.height), row["crop_y"] + row["crop_h"])
    sized = image.resize((row["width"], row["height"]), Image.Resampling.LANCZOS, box=(left, top, right, bottom))
    return np.asarray(ImageOps.mirror(sized) if row["flip"] else sized)


def encode(model: Autoencoder, pixels_HWC: np.ndarray) -> np.ndarray:
    """uint8 pixels to the latent that is stored: bfloat16 words, C, h, w."""
    image_1HWC = mx.array(pixels_HWC)[None].astype(mx.float32) / 127.5 - 1.0
    return np.array(model.encode(image_1HWC)[0].astype(mx.bfloat16).view(mx.uint16))


def _row(row: Row, words_Chw: np.ndarray, mask: bytes | None) -> Row:
    """The finished row; its statistics are those of the stored values."""
    values = (words_Chw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if not np.isfinite(values).all():
        return _rejected(row, 'the autoencoder gave values that are not finite; try latents.precision = "float32"')
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


def _rejected(row: Row, reason: str) -> Row:
    empty = {"shape": [], "dtype": "bfloat16", "mean": 0.0, "std": 0.0, "absmax": 0.0, "mask": None}
    return row | empty | {"rejected": reason, "tensor": np.zeros(0, np.uint16)}


def _batch(rows: list[Row]) -> pa.RecordBatch:
    """A record batch; tensors go in as one buffer, not number by number."""
    schema = LATENTS.batch
    lengths = [len(row["tensor"]) for row in rows]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    values = pa.array(np.concatenate([row["tensor"] for row in rows]), pa.uint16())
    columns = [pa.array([row[f.name] for row in rows], f.type) for f in schema if f.name != "tensor"]
    return pa.record_batch([*columns, pa.ListArray.from_arrays(offsets, values, type=schema.field("tensor").type)], schema=schema)


def _paths(ctx: StageContext) -> dict[str, str]:
    """image_id -> path of every usable image."""
    rows = ctx.rows(IMAGES).select(["image_id", "path", "rejected"]).to_pylist()
    return {row["image_id"]: row["path"] for row in rows if row["rejected"] is None}


STAGE = Stage(
    reads=(BUCKETS, IMAGES),
    writes=LATENTS,
    config=LatentsConfig,
    needs=("image_folder", "family", "autoencoder"),
    wants=wanted_latents,
    run=encode_latents,
)
