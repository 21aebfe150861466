"""Read one file of the image folder: its sha256, format and size, and whether it can be used."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, BinaryIO

from schemas.text_to_image.images import IMAGES
from stages.hashing import file_sha256
from stages.text_to_image.imaging import packed
from stages.text_to_image.imaging.decode import IMAGE_SUFFIXES, ROOM, ImageError, pixel_count, probe
from stages.untrusted import open_regular

Row = dict[str, Any]

UNKNOWN = {"image_id": "", "format": "", "mode": "", "width": 0, "height": 0, "frames": 0, "rejected": None, "detail": ""}


def may_be_image(path: str) -> bool:
    """By its suffix, or the lack of one."""
    suffix = Path(path).suffix.lower()
    return not suffix or suffix in IMAGE_SUFFIXES


def examine(folder: Path, file: Row, *, min_side: int, max_pixels: int, max_bytes: int) -> Row:
    """The row of the table `images`. A file that cannot be used has the reason in `rejected`; nothing is raised."""
    row: Row = {**dict.fromkeys(IMAGES.batch.names), **file, **UNKNOWN}
    suffix = Path(row["path"]).suffix.lower()
    try:
        if not may_be_image(row["path"]):
            raise ImageError("unsupported", f"{suffix} files are not read: convert it to JPEG or PNG")
        _read(folder / row["path"], max_pixels, max_bytes, row)
        if min(row["width"], row["height"]) < min_side:
            size = f"{row['width']} x {row['height']}"
            raise ImageError("too_small", f"{size}: its shorter side is below images.min_side = {min_side}")
    except ImageError as error:
        row |= {"rejected": error.reason, "detail": error.detail}
    # Such a file need not be an image, so it is not called damaged.
    if not suffix and row["rejected"] in ("unreadable", "truncated"):
        row |= {
            "image_id": "",
            "rejected": "unsupported",
            "detail": "the file has no suffix and holds no image in a known format",
        }
    return {name: row[name] for name in IMAGES.batch.names}


def _read(path: Path, max_pixels: int, max_bytes: int, row: Row) -> None:
    """Add the facts of the file to `row`. After an ImageError, `row` has at most `image_id`."""
    try:
        # Opened once, so that all values describe the same bytes even if another file is renamed to this path.
        with _opened(path, max_bytes) as file, ROOM.taken(min(pixel_count(file), max_pixels)):
            try:
                row |= vars(probe(file, max_pixels))
            except ImageError as error:
                # A damaged file keeps its hash and is not read again while it is unchanged. An unsupported one has none: a
                # decoder may be installed later.
                if error.reason != "unsupported":
                    row["image_id"] = file_sha256(file)
                raise
            row["image_id"] = file_sha256(file)
    except FileNotFoundError:
        raise ImageError("unreadable", "the file is gone, is a broken link, or has a name that is not UTF-8") from None
    except OSError as error:
        raise ImageError("unreadable", f"the file cannot be read: {error.strerror or type(error).__name__}") from error


def _opened(path: Path, max_bytes: int) -> BinaryIO:
    if packed.split(path):
        return _opened_member(path, max_bytes)
    size = path.stat().st_size
    if size > max_bytes:
        raise ImageError("too_large", f"{size:,} bytes, more than images.max_bytes = {max_bytes:,}")
    if not size:  # also the endless files of /proc
        raise ImageError("unreadable", "the file is empty")
    try:
        return open_regular(path, max_bytes)
    except ValueError:
        raise ImageError("unreadable", "not a regular file") from None


def _opened_member(path: Path, max_bytes: int) -> BinaryIO:
    try:
        data = packed.read_member(path)
    except ValueError as error:
        raise ImageError("unreadable", str(error)) from None
    if len(data) > max_bytes:
        raise ImageError("too_large", f"{len(data):,} bytes, more than images.max_bytes = {max_bytes:,}")
    if not data:
        raise ImageError("unreadable", "the row holds no bytes of an image")
    return io.BytesIO(data)
