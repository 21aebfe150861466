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
from typing import Any

import mlx.core as mx
import numpy as np
import pyarrow as pa
from PIL import Image, ImageOps

from schemas.buckets import BUCKETS
from schemas.images import IMAGES
from schemas.latents import LATENTS
from stages.models.autoencoder import Autoencoder
from stages.models.load import load_autoencoder
from stages.pixels import ImageError, open_image
from stages.stage import Stage, StageContext, runtime, selects, setting

Row = dict[str, Any]

PRECISIONS = ("float32", "bfloat16")
WANTED = ("latent_id", "image_id", "width", "height", "crop_x", "crop_y", "crop_w", "crop_h", "flip")


@dataclass(frozen=True)
class LatentsConfig:
    """Section [latents]."""

    flip: bool = selects(False, "a mirrored copy of every crop as extra rows; off: text and faces are not symmetric")
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
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


def wanted_latents(ctx: StageContext) -> pa.Table:
    """One row per usable crop, and its mirror image where that is asked for; equal crops are one row."""
    usable = set(_paths(ctx))
    crops: dict[str, Row] = {}
    for bucket in ctx.rows(BUCKETS).to_pylist():
        if bucket["rejected"] is not None or bucket["image_id"] not in usable:
            continue
        for flip in (False, True) if ctx.config.flip else (False,):
            row = {name: bucket[name] for name in WANTED if name in bucket} | {"flip": flip}
            row["latent_id"] = latent_id(row)
            crops[row["latent_id"]] = row
    return pa.Table.from_pylist(list(crops.values()), schema=pa.schema([LATENTS.batch.field(name) for name in WANTED]))


def encode_latents(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """Encode what is pending. Files that changed since `images` read them are named at the end; the rest is kept."""
    if not ctx.pending.num_rows:
        return
    dtype = mx.float32 if ctx.config.precision == "float32" else mx.bfloat16
    model = load_autoencoder(ctx.weights("autoencoder"), ctx.family, dtype)
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
    jobs = [(image_id, ctx.source / paths[image_id], crops) for image_id, crops in by_image.items()]
    done, total = 0, ctx.pending.num_rows
    ctx.progress(done, total, "images")
    for (_, path, crops), future in _ahead(jobs, ctx.config.background, ctx.config.workers):
        try:
            pixels = future.result()
        except Changed:
            changed.append(path.name)
            continue
        except ImageError as error:
            reason = str(error)
            finished = (_rejected(row, reason) for row in crops)
        else:
            finished = (_row(row, encode(model, pixels_HWC)) for row, pixels_HWC in zip(crops, pixels, strict=True))
        for row in finished:
            yield row
            done += 1
            ctx.progress(done, total, "images")


Job = tuple[str, Path, list[Row]]


def _ahead(jobs: list[Job], background: str, workers: int) -> Iterator[tuple[Job, Future[list[np.ndarray]]]]:
    """The jobs in order, each with its crops on the way; a bounded number is decoded before it is asked for."""
    waiting: deque[tuple[Job, Future[list[np.ndarray]]]] = deque()
    todo = iter(jobs)
    with ThreadPoolExecutor(workers, thread_name_prefix="decode") as pool:
        try:
            while True:
                while len(waiting) <= workers and (job := next(todo, None)):
                    waiting.append((job, pool.submit(crops_of, *job, background)))
                if not waiting:
                    return
                yield waiting.popleft()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def crops_of(image_id: str, path: Path, crops: list[Row], background: str) -> list[np.ndarray]:
    """An image's crops, resized: uint8 H, W, 3 each. Raises ImageError for a bad file, Changed for another file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Changed(str(error)) from error
    if hashlib.sha256(data).hexdigest() != image_id:
        raise Changed(path.name)
    image = open_image(io.BytesIO(data), background)
    return [cut(image, row) for row in crops]


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


def _row(row: Row, words_Chw: np.ndarray) -> Row:
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
        "rejected": None,
        "tensor": words_Chw.reshape(-1),
    }


def _rejected(row: Row, reason: str) -> Row:
    empty = {"shape": [], "dtype": "bfloat16", "mean": 0.0, "std": 0.0, "absmax": 0.0}
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
    wants=wanted_latents,
    run=encode_latents,
    loads=("autoencoder",),
)
