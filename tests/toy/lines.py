"""lines: every line of every text file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from stages.settings import runtime, selects, setting
from stages.stage import Stage, StageContext
from tests.toy.schemas import LINES


@dataclass(frozen=True)
class LinesConfig:
    """[lines]: which lines there are."""

    folder: str = selects("texts", "folder of text files")
    lower: bool = setting(True, "store the text in lower case")
    batch_size: int = runtime(2, "rows per batch")


def wanted_lines(ctx: StageContext) -> pa.Table:
    """All rows of the table, in full: reading the files is cheap."""
    folder = ctx.need("text_folder")
    if not folder.is_dir():
        raise ValueError(f"text folder {folder} does not exist: put text files there, or set lines.folder")
    rows = []
    for path in sorted(folder.rglob("*.txt")):
        name = path.relative_to(folder).as_posix()
        for number, text in enumerate(path.read_text().splitlines(), 1):
            text = text.lower() if ctx.config.lower else text
            line_id = hashlib.sha256(f"{name} {number} {text}".encode()).hexdigest()
            rows.append({"line_id": line_id, "path": name, "number": number, "text": text, "words": len(text.split())})
    return LINES.table(rows)


def read_lines(ctx: StageContext) -> Iterator[pa.RecordBatch]:
    """Yield the pending rows unchanged."""
    for start in range(0, ctx.pending.num_rows, ctx.config.batch_size):
        if ctx.stop():
            return
        yield from ctx.pending.slice(start, ctx.config.batch_size).combine_chunks().to_batches()
        ctx.progress(min(start + ctx.config.batch_size, ctx.pending.num_rows), ctx.pending.num_rows, "lines")


STAGE = Stage(reads=(), writes=LINES, config=LinesConfig, needs=("text_folder",), wants=wanted_lines, run=read_lines)
