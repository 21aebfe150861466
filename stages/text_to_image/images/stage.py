"""The stage `images`: one row per file in the image folder, with the reason if the file cannot be used.

The image folder is only read, never written.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from schemas.text_to_image.images import IMAGES
from stages.settings import check_bounds, runtime, selects, setting
from stages.stage import Stage, StageContext
from stages.text_to_image.images.duplicates import mark_duplicates
from stages.text_to_image.images.examine import examine
from stages.text_to_image.images.scan import FILE_COLUMNS, scan
from stages.text_to_image.imaging.decode import CEILING, CEILING_BYTES, MAX_BYTES, MAX_PIXELS

Row = dict[str, Any]

BATCH = 64  # files per record batch: at a few milliseconds per file, a kill loses less than a second of work
NAMED = 5  # rejected files that the summary names


@dataclass(frozen=True)
class ImagesConfig:
    """The section [images] of project.toml: the image folder, and the limits on the size of an image."""

    folder: str = selects("images", "image folder, searched with all folders below it; relative to the project")
    min_side: int = setting(
        64, "shortest side that is used, pixels; a smaller image has fewer than 4 tokens across", bounds=(1, 65536)
    )
    max_pixels: int = setting(
        MAX_PIXELS,
        f"width x height above which a file is refused as a decompression bomb, pixels; at most {CEILING}",
        bounds=(1, CEILING),
    )
    max_bytes: int = setting(
        MAX_BYTES,
        f"size of a file above which it is refused unread, bytes; at most {CEILING_BYTES}: it is read whole",
        bounds=(1, CEILING_BYTES),
    )
    workers: int = runtime(4, "threads that read and decode; a disk is rarely faster with more", bounds=(1, 64))

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.folder.strip():
            raise ValueError(f'folder must name the image folder, such as "images", got "{self.folder}"')


def wanted_images(ctx: StageContext) -> pa.Table:
    """List the image folder. Return one row per file that belongs in the table `images`. The columns are `path`, `bytes`,
    `mtime_ns` and `inode`. If the stored row of a file has the same four values, the file is not opened again. Raises
    ValueError if the folder does not exist or holds no images.
    """
    folder = ctx.need("image_folder")
    files = scan(folder).files
    if not files:
        raise ValueError(f"image folder {folder} holds no images: put some there, or set images.folder")
    return pa.Table.from_pylist(files, schema=pa.schema([IMAGES.batch.field(name) for name in FILE_COLUMNS]))


def unread_images(ctx: StageContext) -> pa.Table:
    """Return the stored rows of unchanged files that could not be read. The columns are `path`, `bytes`, `mtime_ns` and
    `inode`. The runner tries these files again, because a decoder or a permission may have been added.
    """
    unread = [row for row in _rows(ctx.stored) if not row["image_id"]]
    listed = {_file(row) for row in scan(ctx.need("image_folder")).files} if unread else set()
    unread = [row for row in unread if _file(row) in listed]
    return pa.Table.from_pylist(unread, schema=IMAGES.batch).select(FILE_COLUMNS)


def examine_images(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """Hash and decode the pending image files, and yield their rows of the table `images` as record batches. A file is
    pending if it has no up-to-date row. If a row equals its stored row, it is left out. `finish_images` marks
    duplicates later.

    A row of this function depends on its own file alone.
    """
    stored = {row["path"]: row for row in _rows(ctx.stored)}
    pending = sorted(ctx.pending.to_pylist(), key=_path)
    limits = {name: getattr(ctx.config, name) for name in ("min_side", "max_pixels", "max_bytes")}
    read = partial(examine, ctx.need("image_folder"), **limits)
    with ThreadPoolExecutor(ctx.config.workers) as pool:
        for start in range(0, len(pending), BATCH):
            rows = list(_until_stop(ctx, pool, read, pending[start : start + BATCH]))
            yield from _batches([row for row in rows if row != stored.get(row["path"])])
            ctx.progress(start + len(rows), len(pending), "images")
            if ctx.stop():
                return


def _until_stop(ctx: StageContext, pool: ThreadPoolExecutor, read: Callable[[Row], Row], files: list[Row]) -> Iterator[Row]:
    """Yield `read(file)` for each of `files`, in order. The calls run in the threads of `pool`. When the user asks to
    stop, no further call begins. The results of calls that have already begun are still yielded.
    """
    waiting: deque[Future[Row]] = deque()
    todo = iter(files)
    while True:
        while len(waiting) < 2 * ctx.config.workers and not ctx.stop() and (file := next(todo, None)):
            waiting.append(pool.submit(read, file))
        if not waiting:
            return
        future = waiting.popleft()
        if not (ctx.stop() and future.cancel()):
            yield future.result()


def finish_images(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """Mark duplicates among all files of the image folder, and yield the changed rows as record batches. Duplicates are
    files with the same bytes. Tell the user how many files can be used. Do nothing if the user stopped the run before
    all files were read.
    """
    listing = scan(ctx.need("image_folder"))
    stored = {_file(row): row for row in _rows(ctx.stored)}
    pending = [_file(row) for row in ctx.pending.to_pylist()]
    if not all(file in stored for file in pending):
        return
    present = {*map(_file, listing.files), *pending}
    rows = sorted((row for file, row in stored.items() if file in present), key=_path)
    marked = mark_duplicates(rows)
    yield from _batches([new for new, old in zip(marked, rows, strict=True) if new != old])
    _summarise(ctx, marked, listing.masks)


def _rows(stored: pa.Table) -> list[Row]:
    rows: list[Row] = stored.select(IMAGES.batch.names).to_pylist()
    return rows


def _path(row: Row) -> str:
    return str(row["path"])


def _file(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in FILE_COLUMNS)


def _batches(rows: list[Row]) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(rows), BATCH):
        yield pa.RecordBatch.from_pylist(rows[start : start + BATCH], schema=IMAGES.batch)


def _summarise(ctx: StageContext, rows: list[Row], masks: int) -> None:
    """Tell the user how many images are used, and name the first files that are not used. `rows` are all rows of the
    table `images`. `masks` is the number of mask files in the folder.
    """
    rejected = [row for row in rows if row["rejected"]]
    counts = sorted(Counter(row["rejected"] for row in rejected).items())
    reasons = "".join(f", {count} {reason}" for reason, count in counts)
    skipped = f"; {masks} more {'is a mask' if masks == 1 else 'are masks'} of other images" if masks else ""
    ctx.say(f"{len(rows)} files: {len(rows) - len(rejected)} usable{reasons}{skipped}")
    if rejected:
        names = ", ".join(f"{row['path']} ({row['rejected']})" for row in rejected[:NAMED])
        more = f" and {len(rejected) - NAMED} more" if len(rejected) > NAMED else ""
        ctx.say(f"not used: {names}{more}")


STAGE = Stage(
    reads=(),
    writes=IMAGES,
    config=ImagesConfig,
    needs=("image_folder",),
    wants=wanted_images,
    run=examine_images,
    version=2,
    finish=finish_images,
    redo=unread_images,
)
