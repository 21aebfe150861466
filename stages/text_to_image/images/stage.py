"""images: what lies in the image folder. One row per file, usable or not, with the reason; the folder is never written."""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from schemas.text_to_image.images import IMAGES
from stages.hashing import file_sha256
from stages.settings import runtime, selects, setting
from stages.stage import Stage, StageContext
from stages.text_to_image.imaging import masks
from stages.text_to_image.imaging.decode import CEILING, MAX_PIXELS, ImageError, probe

Row = dict[str, Any]

# Opened whatever they hold. A file without any suffix is tried too; every other suffix is a row, unopened, "unsupported":
# a camera's raw file would pass for a TIFF and give its thumbnail.
# fmt: off
IMAGE_SUFFIXES = frozenset({
    ".apng", ".avif", ".avifs", ".bmp", ".dib", ".gif", ".heic", ".heif", ".hif", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg",
    ".jpg", ".jpx", ".mpo", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".qoi", ".tif", ".tiff", ".webp",
})
# No rows: what lies beside images and describes them.
SIDE_SUFFIXES = frozenset({
    ".caption", ".captions", ".csv", ".ini", ".json", ".jsonl", ".lock", ".log", ".md", ".parquet", ".py", ".rst", ".tags",
    ".toml", ".tsv", ".txt", ".xml", ".xmp", ".yaml", ".yml",
})
SIDE_NAMES = frozenset({"authors", "copying", "credits", "license", "licence", "makefile", "notice", "readme", "thumbs.db"})
# fmt: on
PROJECT_FILE = "project.toml"  # where it lies among the images, the folders beside it are the project's own
PROJECT_FOLDERS = frozenset({"tables", "weights", "exports"})

BATCH = 64  # files a batch: at a few milliseconds each, a kill loses well under a second of work


@dataclass(frozen=True)
class ImagesConfig:
    """Section [images]."""

    folder: str = selects("images", "image folder, searched with all folders below it; relative to the project")
    min_side: int = setting(64, "shortest side in pixels that is used; a smaller image has fewer than 4 tokens across")
    max_pixels: int = setting(MAX_PIXELS, f"width x height above which a file is taken for a bomb; at most {CEILING}")
    workers: int = runtime(4, "threads that read and decode; more rarely help a disk")

    def __post_init__(self) -> None:
        if not 1 <= self.max_pixels <= CEILING:
            raise ValueError(f"images.max_pixels = {self.max_pixels} must be between 1 and {CEILING}, the decoder's ceiling")
        if self.min_side < 1:
            raise ValueError(f"images.min_side = {self.min_side} must be at least 1")
        if self.workers < 1:
            raise ValueError(f"images.workers = {self.workers} must be at least 1")


def wanted_images(ctx: StageContext) -> pa.Table:
    """Path, size, time and inode of every file: an unchanged one is known by them and never read again."""
    rows = scan(ctx.need("image_folder"))
    if not rows:
        raise ValueError(f"image folder {ctx.need('image_folder')} holds no images: put some there, or set images.folder")
    names = ("path", "bytes", "mtime_ns", "inode")
    return pa.Table.from_pylist(rows, schema=pa.schema([IMAGES.batch.field(name) for name in names]))


def read_images(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """Hash and decode the new files; then say again the rows whose verdict changed because another file came or went."""
    stored = _still_there(ctx)
    # A row without an id could not be read, or not with what was installed: it is tried again.
    todo = {row["path"]: row for row in stored.values() if not row["image_id"]}
    todo |= {row["path"]: row for row in ctx.pending.to_pylist()}
    settled = {path: row for path, row in stored.items() if path not in todo}
    keepers = _keepers(settled.values())

    done = 0
    order = sorted(todo)
    with ThreadPoolExecutor(ctx.config.workers) as pool:
        for start in range(0, len(order), BATCH):
            if ctx.stop():
                return
            batch = []
            for row in pool.map(lambda path: _examine(ctx, todo[path]), order[start : start + BATCH]):
                judged = _judge(row, keepers)
                settled[row["path"]] = judged
                if judged != stored.get(row["path"]):
                    batch.append(judged)
            yield from _batches(batch)
            done += len(order[start : start + BATCH])
            ctx.progress(done, len(order), "images")

    judged_again = {path: _judge(row, keepers) for path, row in settled.items()}
    changed = [judged_again[path] for path in sorted(settled) if judged_again[path] != settled[path]]
    for start in range(0, len(changed), BATCH):
        yield from _batches(changed[start : start + BATCH])
    _summarise(ctx, list(judged_again.values()))


STAGE = Stage(reads=(), writes=IMAGES, config=ImagesConfig, needs=("image_folder",), wants=wanted_images, run=read_images)


# The folder.


def scan(folder: Path) -> list[Row]:
    """Every file that is a row, sorted by path: hidden files, captions, masks and licences are not. `ValueError`: no folder."""
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        near = difflib.get_close_matches(folder.name, _folders_beside(folder), 1)
        hint = f'; did you mean "{near[0]}"' if near else ""
        raise ValueError(f"image folder {folder} {what}: put the images there, or set images.folder{hint}")
    rows = [_stat_row(folder, entry) for entry in _files(folder, set()) if not _beside(Path(entry.name))]
    of_others = masks.among(row["path"] for row in rows)
    return sorted((row for row in rows if row["path"] not in of_others), key=lambda row: str(row["path"]))


def _masks(folder: Path) -> int:
    """How many files are no rows because they are masks."""
    names = (Path(entry.path).relative_to(folder).as_posix() for entry in _files(folder, set()))
    return len(masks.among(name for name in names if not _beside(Path(name))))


def _files(folder: Path, seen: set[tuple[int, int]]) -> Iterator[os.DirEntry[str]]:
    """Files below a folder; a link to a folder is followed, but no folder is entered twice, and none that a project writes."""
    try:
        about = folder.stat()
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise ValueError(f"folder {folder} cannot be read ({error.strerror}): allow it, or move it out of the images") from error
    if (about.st_dev, about.st_ino) in seen:
        return
    seen.add((about.st_dev, about.st_ino))
    if any(entry.name == PROJECT_FILE for entry in entries):
        entries = [entry for entry in entries if entry.name not in PROJECT_FOLDERS]
    for entry in entries:
        if entry.name.startswith((".", "__MACOSX")):
            continue
        if entry.is_symlink() and not Path(entry.path).exists():
            yield entry  # a link to nothing is a row as well
        elif entry.is_dir():
            yield from _files(Path(entry.path), seen)
        elif entry.is_file():
            yield entry


def _stat_row(folder: Path, entry: os.DirEntry[str]) -> Row:
    try:
        about = entry.stat()
    except OSError:
        about = entry.stat(follow_symlinks=False)
    path = Path(entry.path).relative_to(folder).as_posix()
    # A name that is not UTF-8 has no place in a table: it is shown escaped, and then found unreadable under it.
    shown = path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    inode = about.st_ino & (2**63 - 1)
    return {"path": shown, "bytes": about.st_size, "mtime_ns": about.st_mtime_ns, "inode": inode}


def _beside(name: Path) -> bool:
    return name.suffix.lower() in SIDE_SUFFIXES or name.name.lower() in SIDE_NAMES


def _folders_beside(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.parent.iterdir() if path.is_dir()]
    except OSError:
        return []


# One file.


def _examine(ctx: StageContext, wanted: Row) -> Row:
    """The row of one file, apart from duplicates. Never raises for what a file is or does."""
    row: Row = {name: wanted[name] for name in ("path", "bytes", "mtime_ns", "inode")}
    row |= {"image_id": "", "format": "", "mode": "", "width": 0, "height": 0, "frames": 0, "rejected": None, "detail": ""}
    suffix = Path(row["path"]).suffix.lower()
    try:
        if suffix and suffix not in IMAGE_SUFFIXES:
            raise ImageError("unsupported", f"{suffix} files are not read: convert it to JPEG or PNG")
        _read(ctx.need("image_folder") / row["path"], ctx.config.max_pixels, row)
        if min(row["width"], row["height"]) < ctx.config.min_side:
            size = f"{row['width']} x {row['height']}"
            raise ImageError("too_small", f"{size}: its shorter side is below images.min_side = {ctx.config.min_side}")
    except ImageError as error:
        row |= {"rejected": error.reason, "detail": error.detail}
        if not suffix and error.reason in ("unreadable", "truncated"):
            row |= {
                "image_id": "",
                "rejected": "unsupported",
                "detail": "a file without a suffix that holds no image that is read",
            }
    return {name: row[name] for name in IMAGES.batch.names}


def _read(path: Path, max_pixels: int, row: Row) -> None:
    """Fill the row from one opened file, so that hash and size are of the same bytes, whatever is renamed meanwhile."""
    try:
        with path.open("rb") as file:
            try:
                found = probe(file, max_pixels)
            except ImageError as error:
                if error.reason != "unsupported":
                    row["image_id"] = file_sha256(file)
                raise
            row |= vars(found)
            row["image_id"] = file_sha256(file)
    except FileNotFoundError:
        raise ImageError("unreadable", "it is not there any more, links to nothing, or its name is not UTF-8") from None
    except OSError as error:
        raise ImageError("unreadable", f"the file cannot be read: {error.strerror or type(error).__name__}") from error


# All files together.


def _still_there(ctx: StageContext) -> dict[str, Row]:
    """The stored rows whose file is in the folder as it was."""
    fresh = {tuple(row.values()) for row in wanted_images(ctx).to_pylist()}
    rows = {row["path"]: row for row in ctx.stored.select(IMAGES.batch.names).to_pylist()}
    return {k: r for k, r in rows.items() if (r["path"], r["bytes"], r["mtime_ns"], r["inode"]) in fresh}


def _keepers(rows: Iterable[Row]) -> dict[str, str]:
    """For each content, the first path that has it: the one that is used."""
    keepers: dict[str, str] = {}
    for row in rows:
        if row["rejected"] in (None, "duplicate"):
            keepers[row["image_id"]] = min(row["path"], keepers.get(row["image_id"], row["path"]))
    return keepers


def _judge(row: Row, keepers: dict[str, str]) -> Row:
    """The row, rejected as a duplicate if another path has its bytes and comes first. Enters it among the keepers."""
    if row["rejected"] not in (None, "duplicate"):
        return row
    first = keepers[row["image_id"]] = min(row["path"], keepers.get(row["image_id"], row["path"]))
    if first == row["path"]:
        return row | {"rejected": None, "detail": ""}
    return row | {"rejected": "duplicate", "detail": f"the same bytes as {first}"}


def _batches(rows: list[Row]) -> Iterator[pa.RecordBatch]:
    if rows:
        yield pa.RecordBatch.from_pylist(rows, schema=IMAGES.batch)


def _summarise(ctx: StageContext, rows: list[Row]) -> None:
    counts = Counter(row["rejected"] for row in rows if row["rejected"])
    reasons = "".join(f", {count} {reason}" for reason, count in sorted(counts.items()))
    beside = _masks(ctx.need("image_folder"))
    also = f"; {beside} more are masks of others" if beside else ""
    ctx.say(f"{len(rows)} files: {len(rows) - counts.total()} usable{reasons}{also}")
    bad = sorted(f"{row['path']} ({row['rejected']})" for row in rows if row["rejected"])
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        ctx.say(f"not used: {', '.join(bad[:5])}{more}")
