"""The stage `images`: one row per file in the image folder (only read, never written), with the reason if it cannot be used."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, Literal

import pyarrow as pa

from schemas.text_to_image import IMAGES
from stages.hashing import file_sha256
from stages.run import Run
from stages.settings import Section, runtime, selects, setting, several
from stages.stage import Stage
from stages.text_to_image.images.folder import (
    FILE_COLUMNS,
    RULES,
    FolderConfig,
    Listing,
    check_rules,
    describe,
    no_images,
    reference_rules,
    roots,
    rules,
    scan,
)
from stages.text_to_image.imaging import packed
from stages.text_to_image.imaging.decode import (
    CEILING,
    CEILING_BYTES,
    IMAGE_SUFFIXES,
    MAX_BYTES,
    MAX_PIXELS,
    ROOM,
    ImageError,
    pixel_count,
    probe,
)
from stages.text_to_image.imaging.usable import REFERENCE, first_names, names_copy
from stages.untrusted import open_regular

Row = dict[str, Any]

BATCH = 64  # files per record batch: at a few milliseconds per file, a kill loses less than a second of work
NAMED = 5  # rejected files that the summary names
UNKNOWN = {"image_id": "", "format": "", "mode": "", "width": 0, "height": 0, "frames": 0, "rejected": None, "detail": ""}


@dataclass(frozen=True)
class ImagesConfig(Section):
    folder: str | tuple[FolderConfig, ...] = selects(
        "images",
        "image folder, searched with all folders below it; relative to the project; or several [[images.folder]] with path; []: "
        "no pictures, for a slider",
        path=True,
    )
    layout: Literal["auto", "plain"] = selects(
        "auto", "auto: kohya's folder names are read (10_ohwx cat: 10 repeats; reg: regularisation); plain: they mean nothing"
    )
    references: tuple[str, ...] | None = selects(
        None,
        'folders of references for edit training, such as ["before"]: before/cat.png is a reference of cat.png; unset: control, '
        "control_1 and so on, and cat_in.png for cat_out.png; []: none",
    )
    min_side: int = setting(
        64, "shortest side that is used, pixels; a smaller image has fewer than 4 tokens across", unit="pixels", bounds=(1, 65536)
    )
    max_pixels: int = setting(
        MAX_PIXELS,
        f"width x height above which a file is refused as a decompression bomb, pixels; at most {CEILING}",
        unit="pixels",
        bounds=(1, CEILING),
    )
    max_bytes: int = setting(
        MAX_BYTES,
        f"size of a file above which it is refused unread, bytes; at most {CEILING_BYTES}: it is read whole",
        unit="bytes",
        bounds=(1, CEILING_BYTES),
    )
    workers: int = runtime(4, "threads that read and decode; a disk is rarely faster with more", unit="threads", bounds=(1, 64))

    def check(self) -> None:
        if isinstance(self.folder, str) and not self.folder.strip():
            raise ValueError(f'folder must name the image folder, such as "images", got "{self.folder}"')
        for name in self.references or ():
            if not name.strip("/. ") or name.startswith("/") or ".." in name.split("/"):
                raise ValueError(f'references must name folders below the image folder, such as "before", got "{name}"')
        for use in (False, True):
            weighted = {each.weight is not None for each in self.folders if each.regularisation is use}
            if len(weighted) > 1:
                raise ValueError("folder must have a weight in every [[images.folder]] or in none, got both")

    @property
    def folders(self) -> tuple[FolderConfig, ...]:
        return self.folder if isinstance(self.folder, tuple) else ()

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(each.path for each in self.folders) if isinstance(self.folder, tuple) else (self.folder,)


# One file


def may_be_image(path: str) -> bool:
    suffix = Path(path).suffix.lower()
    return not suffix or suffix in IMAGE_SUFFIXES


def examine(folder: Path, file: Row, *, min_side: int, max_pixels: int, max_bytes: int) -> Row:
    """The row of the table `images`. A file that cannot be used has the reason in `rejected`; nothing is raised."""
    row: Row = {**dict.fromkeys(IMAGES.batch.names), **file, **UNKNOWN}
    suffix = Path(row["path"]).suffix.lower()
    try:
        if suffix in packed.SUFFIXES and row["offset"] is None and (problem := packed.damage(folder / row["path"])):
            raise ImageError("unreadable", problem)
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
        detail = "the file has no suffix and holds no image in a known format"
        row |= {"image_id": "", "rejected": "unsupported", "detail": detail}
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
    inside = packed.split(path) is not None
    try:
        data = packed.read_member(path, max_bytes) if inside else b""
    except ValueError as error:
        raise ImageError("unreadable", str(error)) from None
    size = len(data) if inside else path.stat().st_size
    if size > max_bytes:
        raise ImageError("too_large", f"{size:,} bytes, more than images.max_bytes = {max_bytes:,}")
    if not size:  # also the endless files of /proc
        raise ImageError("unreadable", "the row holds no bytes of an image" if inside else "the file is empty")
    try:
        return io.BytesIO(data) if inside else open_regular(path, max_bytes)
    except ValueError:
        raise ImageError("unreadable", "not a regular file") from None


def mark_duplicates(rows: Iterable[Row]) -> list[Row]:
    """All rows in the given order. Of rows with one image_id the original stays: subject before regularisation, then no
    name of a copy, then the first path.
    """

    def group(row: Row) -> tuple[str, bool]:
        # A reference may have the bytes of an image.
        return row["image_id"], row["use"] == REFERENCE

    rows, first = list(rows), dict[tuple[str, bool], str]()
    decoded = [row for row in rows if row["rejected"] in (None, "duplicate")]
    for row in sorted(decoded, key=lambda row: (row["use"] or "", names_copy(row["path"]), row["path"])):
        first.setdefault(group(row), row["path"])
    marked = []
    for row in rows:
        path = first.get(group(row), row["path"])
        if row["rejected"] not in (None, "duplicate"):
            marked.append(row)
        elif row["path"] == path:
            marked.append(row | {"rejected": None, "detail": ""})
        else:
            marked.append(row | {"rejected": "duplicate", "detail": f"the same bytes as {path}"})
    return marked


# The stage


def wanted_images(run: Run[ImagesConfig]) -> pa.Table:
    """FILE_COLUMNS, by which an unchanged file is recognised, and RULES, which follow from its folder."""
    return _wanted(run.once(_listing).files)


def unread_images(run: Run[ImagesConfig]) -> pa.Table:
    """Files that an earlier run could not read: a decoder may have been installed since, or a permission given."""
    unread = {_file(row) for row in _rows(run.output.stored) if not row["image_id"]}
    return _wanted([row for row in run.once(_listing).files if _file(row) in unread])


def _wanted(files: list[Row]) -> pa.Table:
    return IMAGES.select(files, (*FILE_COLUMNS, *RULES))


def _listing(run: Run[ImagesConfig]) -> Listing:
    """The files of the image folder, with their RULES. Raises ValueError if there is no image to train on."""
    folder, config = run.needs["image_folder"], run.config
    if config.folder == ():
        return Listing([], 0)
    below = roots(config.folders, folder, run.root)
    listing = scan(folder, below)
    paths = [row["path"] for row in listing.files]
    pictures = [path for path in paths if may_be_image(path)]
    if not pictures:
        raise ValueError(no_images(folder))
    read_names = config.layout == "auto"
    found = rules(paths, below, read_names)
    if read_names or config.references is not None:
        found |= reference_rules(pictures, config.references)
    check_rules(found, folder)
    return Listing([row | found[row["path"]] for row in listing.files], listing.masks)


def examine_images(run: Run[ImagesConfig]) -> Iterator[pa.RecordBatch]:
    """The rows of the pending files, each from its own file alone: `finish_images` marks duplicates."""
    stored = {row["path"]: row for row in _rows(run.output.stored)}
    pending = sorted(run.output.pending.to_pylist(), key=itemgetter("path"))
    limits = {name: getattr(run.config, name) for name in ("min_side", "max_pixels", "max_bytes")}

    def row_of(file: Row) -> Row | None:
        if run.report.stop():  # what has begun is finished
            return None
        old = stored.get(file["path"])
        # It is read only if it has changed, or could not be read before.
        if old and old["image_id"] and _file(old) == _file(file):
            return old | {name: file[name] for name in RULES}
        return examine(run.needs["image_folder"], file, **limits)

    with ThreadPoolExecutor(run.config.workers) as pool:
        for start in range(0, len(pending), BATCH):
            rows = [row for row in pool.map(row_of, pending[start : start + BATCH]) if row]
            # A row may be as before, where only a failed read was tried again.
            changed = [row for row in rows if row != stored.get(row["path"])]
            yield from pa.Table.from_pylist(changed, schema=IMAGES.batch).to_batches()
            run.report.progress(start + len(rows), len(pending), "images")
            if run.report.stop():
                return


def foreseen_images(run: Run[ImagesConfig]) -> pa.Table:
    """Reads the new files."""
    run.output.pending = wanted_images(run)
    read = [row for batch in examine_images(run) for row in batch.to_pylist()]
    rows = {_file(row): row for row in (*_rows(run.output.stored), *read)}
    kept = [rows[file] for file in map(_file, run.once(_listing).files) if file in rows]
    return pa.Table.from_pylist(mark_duplicates(kept), schema=IMAGES.batch)


def finish_images(run: Run[ImagesConfig]) -> Iterator[pa.RecordBatch]:
    listing = run.once(_listing)
    stored = {_file(row): row for row in _rows(run.output.stored)}
    pending = [_file(row) for row in run.output.pending.to_pylist()]
    # The run was stopped before all files were read.
    if not all(file in stored for file in pending):
        return
    present = set(map(_file, listing.files))
    rows = sorted((row for file, row in stored.items() if file in present), key=itemgetter("path"))
    marked = mark_duplicates(rows)
    changed = [new for new, old in zip(marked, rows, strict=True) if new != old]
    yield from pa.Table.from_pylist(changed, schema=IMAGES.batch).to_batches(BATCH)
    # An unchanged folder was described before.
    if not changed and not pending and len(rows) == len(stored):
        return
    for line in describe(marked):
        run.report.say(line)
    rejected = [row for row in marked if row["rejected"]]
    counts = sorted(Counter(row["rejected"] for row in rejected).items())
    reasons = "".join(f", {count} {reason}" for reason, count in counts)
    masks = (
        f"; {listing.masks} more {'is a mask' if listing.masks == 1 else 'are masks'} of other images" if listing.masks else ""
    )
    run.report.say(f"{several(len(marked), 'file')}: {len(marked) - len(rejected)} usable{reasons}{masks}")
    if rejected:
        names = [f"{row['path']} ({row['rejected']})" for row in rejected]
        run.report.say(f"not used: {first_names(names, NAMED)}")


def _rows(stored: pa.Table) -> list[Row]:
    rows: list[Row] = stored.select(IMAGES.batch.names).to_pylist()
    return rows


def _file(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in FILE_COLUMNS)


STAGE = Stage(
    reads=(),
    writes=IMAGES,
    unit="file",
    config=ImagesConfig,
    needs=("image_folder",),
    wants=wanted_images,
    foresee=foreseen_images,
    run=examine_images,
    version=2,
    finish=finish_images,
    redo=unread_images,
    opens=packed.pending_files,
)
