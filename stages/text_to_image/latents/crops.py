"""Crops, cut from their images and resized in threads that work ahead of the autoencoder, and which mask each image has.
`stages/text_to_image/buckets.py` decides where a crop lies.
"""

from __future__ import annotations

import hashlib
import io
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from PIL import Image, ImageOps

from stages.hashing import file_sha256
from stages.text_to_image.imaging import masks, packed
from stages.text_to_image.imaging.decode import CEILING_BYTES, MAX_BYTES, ROOM, ImageError, open_alpha, open_image, pixel_count
from stages.text_to_image.imaging.masks import mask_finder
from stages.text_to_image.imaging.usable import usable_paths, usable_rows
from stages.untrusted import open_regular, read_bytes

Row = dict[str, Any]
Crop = tuple[np.ndarray, bytes | None]  # pixels, uint8 (height, width, 3), and the mask, one byte per token, if there is one


class FileChanged(Exception):  # noqa: N818  (the program did not fail)
    """An image or mask file has another sha256 than the recorded one, or can no longer be read."""


@dataclass(frozen=True)
class ImageJob:
    image_id: str
    path: Path
    rows: list[Row]  # the pending crops: the columns that are known before encoding
    mask: Path | None


def decode_ahead(jobs: list[ImageJob], background: str, workers: int) -> Iterator[tuple[ImageJob, Future[list[Crop]]]]:
    """Yield (job, future of its crops) in order, with at most `workers` + 1 images ahead. Closing the iterator waits for
    the threads.
    """
    waiting: deque[tuple[ImageJob, Future[list[Crop]]]] = deque()
    todo = iter(jobs)
    with ThreadPoolExecutor(workers, thread_name_prefix="decode") as pool:
        try:
            while True:
                while len(waiting) <= workers and (job := next(todo, None)):
                    waiting.append((job, pool.submit(decode_crops, job, background)))
                if not waiting:
                    return
                yield waiting.popleft()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def decode_crops(job: ImageJob, background: str) -> list[Crop]:
    """One pair (pixels, mask) per row. Raises ImageError if image or mask cannot be used, and FileChanged if a file has
    changed.
    """
    data = _read_unchanged(job.path, job.image_id)
    with ROOM.taken(pixel_count(io.BytesIO(data))):
        image = open_image(io.BytesIO(data), background)
        mask = _read_mask(job, data, image)
        return [(cut_crop(image, row), masks.token_mask(mask, image.size, row) if mask else None) for row in job.rows]


def cut_crop(image: Image.Image, row: Row) -> np.ndarray:
    """Resized with Lanczos, uint8 (height, width, 3). The edges of a crop may be fractions of a pixel."""
    left, top = max(0.0, row["crop_x"]), max(0.0, row["crop_y"])
    right = min(float(image.width), row["crop_x"] + row["crop_w"])
    bottom = min(float(image.height), row["crop_y"] + row["crop_h"])
    sized = image.resize((row["width"], row["height"]), Image.Resampling.LANCZOS, box=(left, top, right, bottom))
    return np.asarray(ImageOps.mirror(sized) if row["flip"] else sized)


def _read_mask(job: ImageJob, data: bytes, image: Image.Image) -> Image.Image | None:
    mask_id = job.rows[0]["mask_id"]
    if mask_id in ("", ALPHA):
        return open_alpha(io.BytesIO(data)) if mask_id else None
    # The row has the sha256 of a mask file, which is gone since.
    if job.mask is None:
        raise FileChanged(job.path.name)
    mask = masks.read_mask(job.mask, _read_unchanged(job.mask, mask_id))
    if not masks.same_aspect_ratio(mask, image):
        sizes = f"{mask.width} x {mask.height}, the image {image.width} x {image.height}"
        raise ImageError("mask", f"{job.mask.name} is {sizes}: the aspect ratios differ")
    return mask


def _read_unchanged(path: Path, sha256: str) -> bytes:
    try:
        data = packed.read_member(path) if packed.split(path) else read_bytes(path, CEILING_BYTES)
    except ValueError as error:
        raise FileChanged(str(error)) from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise FileChanged(path.name)
    return data


ALPHA = "alpha"  # the mask_id of an image's own alpha channel: the image_id covers its content
MAY_HIDE_ALPHA = ("PNG", "GIF", "WEBP")  # formats with transparent pixels even in modes without an alpha channel


def mask_ids(images: pa.Table, folder: Path, mask: Literal["none", "alpha", "file"]) -> dict[str, str]:
    """mask_id of every usable image, references included: the sha256 of its mask file, "alpha", or "" for no mask.

    Raises ValueError if no image is usable, if a mask file cannot be read, or if files are asked for and there is none.
    """
    usable = usable_rows(images, references=True)
    if mask == "none":
        return {row["image_id"]: "" for row in usable}
    if mask == "alpha":
        return {row["image_id"]: ALPHA if _may_have_alpha(row["mode"], row["format"]) else "" for row in usable}
    files = mask_files(usable_paths(images), folder)
    if not files:
        name = Path(usable[0]["path"]).stem
        raise ValueError(
            f'latents.mask is "file", but none of the {len(usable)} images has a mask file: for {usable[0]["path"]}, '
            f"write {name}.mask.png beside it, or masks/{name}.png"
        )
    return {row["image_id"]: _sha256(files[row["image_id"]]) if row["image_id"] in files else "" for row in usable}


def mask_files(paths: dict[str, list[str]], folder: Path) -> dict[str, Path]:
    """Mask file by image_id: cat.mask.png or masks/cat.png for cat.jpg. Images without one are left out."""
    find = mask_finder(folder)
    return {image_id: folder / path for image_id, names in paths.items() if (path := find(names))}


def _may_have_alpha(mode: str, form: str) -> bool:
    return "A" in mode.upper() or form in MAY_HIDE_ALPHA


def _sha256(path: Path) -> str:
    try:
        with open_regular(path, MAX_BYTES) as file:
            return file_sha256(file)
    except OSError as error:
        raise ValueError(f"the mask {path} cannot be read: {error.strerror or error}") from error
