"""lines: every line of every text file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from stages.run import Run
from stages.settings import Section, runtime, selects
from stages.stage import Stage
from tests.toy.schemas import LINES


@dataclass(frozen=True)
class LinesConfig(Section):
    """[lines]: which lines there are."""

    folder: str = selects("texts", "folder of text files")
    batch_size: int = runtime(2, "rows per batch")


def wanted_lines(run: Run[Any]) -> pa.Table:
    """All rows of the table, in full: reading the files is cheap."""
    folder = run.needs["text_folder"]
    rows = []
    for path in sorted(folder.rglob("*.txt")):
        name = path.relative_to(folder).as_posix()
        for number, text in enumerate(path.read_text().splitlines(), 1):
            line_id = hashlib.sha256(f"{name} {number} {text}".encode()).hexdigest()
            rows.append({"line_id": line_id, "path": name, "number": number, "text": text, "words": len(text.split())})
    return LINES.select(rows, LINES.batch.names)


def read_lines(run: Run[Any]) -> Iterator[pa.RecordBatch]:
    for start in range(0, run.output.pending.num_rows, run.config.batch_size):
        if run.report.stop():
            return
        yield from run.output.pending.slice(start, run.config.batch_size).combine_chunks().to_batches()
        run.report.progress(min(start + run.config.batch_size, run.output.pending.num_rows), run.output.pending.num_rows, "lines")


STAGE = Stage(reads=(), writes=LINES, config=LinesConfig, needs=("text_folder",), wants=wanted_lines, run=read_lines)
