"""The stage `sources`: one row per file of the roots, with the reason if the file has no units. The roots are only read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from schemas.retrieval.sources import SOURCES
from stages.retrieval.sources.examine import LANGUAGES, examine
from stages.retrieval.sources.roots import find_roots
from stages.retrieval.sources.scan import FILE_COLUMNS, scan
from stages.run import Run
from stages.settings import require, runtime, selects, setting
from stages.stage import Stage

Row = dict[str, Any]

CEILING = 64 * 2**20  # bytes: the largest value of max_bytes, since a file is read whole
QUIET = ("language",)  # reasons of which the summary names no files: a folder of code holds many other files


@dataclass(frozen=True)
class SourcesConfig:
    """The section [sources]: the folders and packages whose code is read, and which files are left out."""

    roots: tuple[str, ...] = selects(
        ("code",),
        'folders, relative to the project, or installed packages as "package:NAME"; "package:stdlib" is Python\'s own library',
        path=True,
    )
    exclude: tuple[str, ...] = selects((), "files that are left out beside those of .gitignore, as patterns of .gitignore")
    languages: tuple[str, ...] = setting((), "languages that are read, such as python and rust; empty: all known languages")
    max_bytes: int = setting(
        1_000_000, f"size above which a file is not read, bytes: data more often than code; at most {CEILING}"
    )
    batch_size: int = runtime(64, "files per record batch, which a kill can lose")

    def __post_init__(self) -> None:
        if not self.roots or not all(self.roots):
            raise ValueError('roots must be a list of folders or packages, such as ["code"], got ' + repr(list(self.roots)))
        if unknown := sorted(set(self.languages) - set(LANGUAGES.values())):
            raise ValueError(f"languages must be of {', '.join(sorted(set(LANGUAGES.values())))}, got {unknown[0]!r}")
        require(self, "max_bytes", 1, CEILING)
        require(self, "batch_size", 1)


def wanted_sources(run: Run[SourcesConfig]) -> pa.Table:
    """FILE_COLUMNS, by which an unchanged file is recognised. Raises ValueError if a root does not exist, or all are empty."""
    rows = run.once(_listing)
    if not rows:
        raise ValueError(f"the roots {', '.join(run.config.roots)} hold no files: set sources.roots or sources.exclude")
    return pa.Table.from_pylist(rows, schema=pa.schema([SOURCES.batch.field(name) for name in FILE_COLUMNS]))


def _listing(run: Run[SourcesConfig]) -> list[Row]:
    return [row for root in find_roots(run.config.roots, run.root) for row in scan(root, run.config.exclude)]


def examine_sources(run: Run[SourcesConfig]) -> Iterator[pa.RecordBatch]:
    """Each row from its own file alone; `finish_sources` marks duplicates."""
    pending = sorted(run.output.pending.to_pylist(), key=lambda row: str(row["path"]))
    limits: dict[str, Any] = {"max_bytes": run.config.max_bytes, "languages": run.config.languages}
    for start in range(0, len(pending), run.config.batch_size):
        if run.report.stop():
            return
        files = pending[start : start + run.config.batch_size]
        yield _batch([examine(run.root / Path(row["file"]).expanduser(), row, **limits) for row in files])
        run.report.progress(start + len(files), len(pending), "files")


def finish_sources(run: Run[SourcesConfig]) -> Iterator[pa.RecordBatch]:
    stored = {_file(row): row for row in run.output.stored.select(SOURCES.batch.names).to_pylist()}
    listed = [_file(row) for row in run.once(_listing)]
    # The run was stopped before all files were read.
    if not all(_file(row) in stored for row in run.output.pending.to_pylist()):
        return
    rows = [stored[file] for file in listed if file in stored]
    marked = mark_duplicates(rows)
    changed = [new for new, old in zip(marked, rows, strict=True) if new != old]
    if changed:
        yield _batch(changed)
    _summarise(run, marked)


def mark_duplicates(rows: list[Row]) -> list[Row]:
    """Of files with the same bytes, the first path is used. Rows that are skipped for another reason stay."""
    first: dict[str, str] = {}
    for row in (row for row in rows if row["skipped"] in (None, "duplicate")):
        first[row["source_id"]] = min(row["path"], first.get(row["source_id"], row["path"]))
    return [_marked(row, first[row["source_id"]]) if row["skipped"] in (None, "duplicate") else row for row in rows]


def _marked(row: Row, first: str) -> Row:
    if row["path"] == first:
        return row | {"skipped": None, "detail": ""}
    return row | {"skipped": "duplicate", "detail": f"the same bytes as {first}"}


def _file(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in FILE_COLUMNS)


def _batch(rows: list[Row]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schema=SOURCES.batch)


def _summarise(run: Run[SourcesConfig], rows: list[Row]) -> None:
    skipped = [row for row in rows if row["skipped"]]
    counts = "".join(f", {count} {reason}" for reason, count in sorted(Counter(row["skipped"] for row in skipped).items()))
    run.report.say(f"{len(rows)} files: {len(rows) - len(skipped)} used{counts}")
    named = [f"{row['path']} ({row['skipped']})" for row in skipped if row["skipped"] not in QUIET]
    if named:
        more = f" and {len(named) - 5} more" if len(named) > 5 else ""
        run.report.say(f"not used: {', '.join(named[:5])}{more}")


STAGE = Stage(
    reads=(),
    writes=SOURCES,
    config=SourcesConfig,
    wants=wanted_sources,
    run=examine_sources,
    finish=finish_sources,
    ships=False,
    version=2,  # 2: a header .h is C++ if its text is
)
