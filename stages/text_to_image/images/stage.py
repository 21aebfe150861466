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
from stages.run import Run
from stages.stage import Stage
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


def wanted_images(run: Run[Any]) -> pa.Table:
    """FILE_COLUMNS, by which an unchanged file is recognised, and RULES, which follow from its folder."""
    folder = run.needs["image_folder"]
    files = run.once(_listing).files
    if not any(may_be_image(row["path"]) for row in files):
        raise ValueError(no_images(folder))
    paths, read_names = [row["path"] for row in files], run.config.layout == "auto"
    found = rules(paths, roots(run.config, folder, run.root), read_names)
    given = run.config.references
    if read_names or given is not None:
        pictures = [path for path in paths if may_be_image(path)]
        found |= reference_rules(pictures, given)
    check_rules(found, folder)
    schema = pa.schema([IMAGES.batch.field(name) for name in (*FILE_COLUMNS, *RULES)])
    return pa.Table.from_pylist([row | found[row["path"]] for row in files], schema=schema)


def unread_images(run: Run[Any]) -> pa.Table:
    """Files that an earlier run could not read: a decoder may have been installed since, or a permission given."""
    unread = {_file(row) for row in _rows(run.output.stored) if not row["image_id"]}
    wanted = wanted_images(run) if unread else IMAGES.batch.empty_table().select([*FILE_COLUMNS, *RULES])
    return wanted.filter(pa.array([_file(row) in unread for row in wanted.to_pylist()], pa.bool_()))


def _listing(run: Run[Any]) -> Listing:
    folder: Path = run.needs["image_folder"]
    return scan(folder, [root.path for root in roots(run.config, folder, run.root)])


def examine_images(run: Run[Any]) -> Iterator[pa.RecordBatch]:
    """The rows of the pending files, each from its own file alone: `finish_images` marks duplicates."""
    stored = {row["path"]: row for row in _rows(run.output.stored)}
    pending = sorted(run.output.pending.to_pylist(), key=_path)
    limits = {name: getattr(run.config, name) for name in ("min_side", "max_pixels", "max_bytes")}
    read = partial(_row_of, stored, partial(examine, run.needs["image_folder"], **limits))
    with ThreadPoolExecutor(run.config.workers) as pool:
        for start in range(0, len(pending), BATCH):
            rows = list(_until_stop(run, pool, read, pending[start : start + BATCH]))
            # A row may be as before, where only a failed read was tried again.
            yield from _batches([row for row in rows if row != stored.get(row["path"])])
            run.report.progress(start + len(rows), len(pending), "images")
            if run.report.stop():
                return


def _row_of(stored: dict[str, Row], read: Callable[[Row], Row], file: Row) -> Row:
    """The row of a file. It is read only if it has changed, or could not be read before."""
    old = stored.get(file["path"])
    if old and old["image_id"] and _file(old) == _file(file):
        return old | {name: file[name] for name in RULES}
    return read(file)


def _until_stop(run: Run[Any], pool: ThreadPoolExecutor, read: Callable[[Row], Row], files: list[Row]) -> Iterator[Row]:
    """`read(file)` of each, in order. After a stop no call begins, but those that have begun are yielded."""
    waiting: deque[Future[Row]] = deque()
    todo = iter(files)
    while True:
        while len(waiting) < 2 * run.config.workers and not run.report.stop() and (file := next(todo, None)):
            waiting.append(pool.submit(read, file))
        if not waiting:
            return
        future = waiting.popleft()
        if not (run.report.stop() and future.cancel()):
            yield future.result()


def opened_files(run: Run[Any]) -> Iterator[Path]:
    folder: Path = run.needs["image_folder"]
    yield from (packed.file_to_open(folder / path) for path in run.output.pending["path"].to_pylist())


def finish_images(run: Run[Any]) -> Iterator[pa.RecordBatch]:
    listing = run.once(_listing)
    stored = {_file(row): row for row in _rows(run.output.stored)}
    pending = [_file(row) for row in run.output.pending.to_pylist()]
    # The run was stopped before all files were read.
    if not all(file in stored for file in pending):
        return
    present = set(map(_file, listing.files))
    rows = sorted((row for file, row in stored.items() if file in present), key=_path)
    marked = mark_duplicates(rows)
    yield from _batches([new for new, old in zip(marked, rows, strict=True) if new != old])
    _summarise(run, marked, listing.masks)


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


def _summarise(run: Run[Any], rows: list[Row], masks: int) -> None:
    rejected = [row for row in rows if row["rejected"]]
    counts = sorted(Counter(row["rejected"] for row in rejected).items())
    reasons = "".join(f", {count} {reason}" for reason, count in counts)
    skipped = f"; {masks} more {'is a mask' if masks == 1 else 'are masks'} of other images" if masks else ""
    for line in (*describe(rows), *near_misses(row["path"] for row in rows)):
        run.report.say(line)
    run.report.say(f"{len(rows)} files: {len(rows) - len(rejected)} usable{reasons}{skipped}")
    if rejected:
        names = ", ".join(f"{row['path']} ({row['rejected']})" for row in rejected[:NAMED])
        more = f" and {len(rejected) - NAMED} more" if len(rejected) > NAMED else ""
        run.report.say(f"not used: {names}{more}")


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
