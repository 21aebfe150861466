"""The stage `images`: one row per file in the image folder, with the reason if the file cannot be used.

The image folder is only read, never written.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from schemas.text_to_image.images import IMAGES
from stages.stage import Stage, StageContext
from stages.text_to_image.images.config import ImagesConfig
from stages.text_to_image.images.duplicates import mark_duplicates
from stages.text_to_image.images.examine import examine, may_be_image
from stages.text_to_image.images.hints import no_images
from stages.text_to_image.images.layout import RULES, check_rules, describe, near_misses, reference_rules, rules
from stages.text_to_image.images.roots import roots
from stages.text_to_image.images.scan import FILE_COLUMNS, Listing, scan
from stages.text_to_image.imaging import packed

Row = dict[str, Any]

BATCH = 64  # files per record batch: at a few milliseconds per file, a kill loses less than a second of work
NAMED = 5  # rejected files that the summary names


def wanted_images(ctx: StageContext) -> pa.Table:
    """List the image folder. Return one row per file that belongs in the table `images`. The columns are `path`,
    `bytes`, `mtime_ns`, `inode` and those that the file's folder decides, such as `repeats`. If the stored row of a
    file has the same values, the file is not opened again. `ctx` is the stage's context: its image folder and settings.
    Raises ValueError if the folder does not exist or holds no images.
    """
    folder = ctx.need("image_folder")
    files = _listing(ctx).files
    if not any(may_be_image(row["path"]) for row in files):
        raise ValueError(no_images(folder))
    paths, read_names = [row["path"] for row in files], ctx.config.layout == "auto"
    found = rules(paths, roots(ctx.config, folder, ctx.root), read_names)
    given = ctx.config.references
    if read_names or given is not None:
        pictures = [path for path in paths if may_be_image(path)]
        found |= reference_rules(pictures, given)
    check_rules(found, folder)
    schema = pa.schema([IMAGES.batch.field(name) for name in (*FILE_COLUMNS, *RULES)])
    return pa.Table.from_pylist([row | found[row["path"]] for row in files], schema=schema)


def unread_images(ctx: StageContext) -> pa.Table:
    """Return the rows of files that an earlier run could not read, so that they are tried again. The columns are those
    of `wanted_images`. `ctx` is the stage's context: its stored rows and settings.

    Since the earlier run, a decoder may have been installed, or a permission given.
    """
    unread = {_file(row) for row in _rows(ctx.stored) if not row["image_id"]}
    wanted = wanted_images(ctx) if unread else IMAGES.batch.empty_table().select([*FILE_COLUMNS, *RULES])
    return wanted.filter(pa.array([_file(row) in unread for row in wanted.to_pylist()], pa.bool_()))


def _listing(ctx: StageContext) -> Listing:
    folder: Path = ctx.need("image_folder")
    return scan(folder, [root.path for root in roots(ctx.config, folder, ctx.root)])


def examine_images(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """Hash and decode the pending image files, and yield their rows of the table `images` as record batches. A file is
    pending if it has no up-to-date row. If a row equals its stored row, it is left out. `ctx` is the stage's context:
    its rows and settings. `finish_images` marks duplicates later.

    A row of this function depends on its own file alone. If only the columns that its folder decides have changed, the
    file is not read again.
    """
    stored = {row["path"]: row for row in _rows(ctx.stored)}
    pending = sorted(ctx.pending.to_pylist(), key=_path)
    limits = {name: getattr(ctx.config, name) for name in ("min_side", "max_pixels", "max_bytes")}
    read = partial(_row_of, stored, partial(examine, ctx.need("image_folder"), **limits))
    with ThreadPoolExecutor(ctx.config.workers) as pool:
        for start in range(0, len(pending), BATCH):
            rows = list(_until_stop(ctx, pool, read, pending[start : start + BATCH]))
            yield from _batches([row for row in rows if row != stored.get(row["path"])])
            ctx.progress(start + len(rows), len(pending), "images")
            if ctx.stop():
                return


def _row_of(stored: dict[str, Row], read: Callable[[Row], Row], file: Row) -> Row:
    """Return the row of the table `images` for one image file. `stored` maps paths to the rows that the table already
    has. `read(file)` opens the file and returns its row. `file` is a dict that describes the file as it is now, such as
    its path, size and modification time. If the file is unchanged and could be read before, its row in `stored` is
    reused. Otherwise, the result is `read(file)`.

    The dict `file` is a row of the table that `wanted_images` returns. It also has the columns that the folder decides,
    such as `repeats`. In a reused row, these columns are taken from `file`.
    """
    old = stored.get(file["path"])
    if old and old["image_id"] and _file(old) == _file(file):
        return old | {name: file[name] for name in RULES}
    return read(file)


def _until_stop(ctx: StageContext, pool: ThreadPoolExecutor, read: Callable[[Row], Row], files: list[Row]) -> Iterator[Row]:
    """Yield `read(file)` for each of `files`, in order. `files` are rows of the table `images`. The calls run in the
    threads of `pool`. `ctx` is the stage's context, which tells if the user asks to stop. Then no further call begins.
    The results of calls that have already begun are still yielded.
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


def opened_files(ctx: StageContext) -> Iterator[Path]:
    """Yield the path of every image that this stage still has to examine. `ctx` is the stage's context, which gives the
    image folder. The attribute `ctx.pending` has one row for each of these images, because the table `images` has no
    up-to-date row for them.
    """
    folder: Path = ctx.need("image_folder")
    yield from (packed.file_to_open(folder / path) for path in ctx.pending["path"].to_pylist())


def finish_images(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """Mark duplicates among all files of the image folder, and yield the changed rows as record batches. Duplicates are
    files with the same bytes. Tell the user how many files can be used. `ctx` is the stage's context: its rows and
    settings. Do nothing if the user stopped the run before all files were read.
    """
    listing = _listing(ctx)
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
    """Tell the user how many images are used, and name the first files that are not used. `ctx` is the stage's context,
    which passes lines to the user. `rows` are all rows of the table `images`. `masks` is the number of mask files in
    the folder.
    """
    rejected = [row for row in rows if row["rejected"]]
    counts = sorted(Counter(row["rejected"] for row in rejected).items())
    reasons = "".join(f", {count} {reason}" for reason, count in counts)
    skipped = f"; {masks} more {'is a mask' if masks == 1 else 'are masks'} of other images" if masks else ""
    for line in (*describe(rows), *near_misses(row["path"] for row in rows)):
        ctx.say(line)
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
    opens=opened_files,
)
