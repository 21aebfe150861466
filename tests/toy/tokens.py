"""tokens: the characters of every line as token ids, with a second tensor of another dtype."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from stages.run import Run
from stages.settings import Section, runtime, setting
from stages.stage import Stage
from tests.toy.schemas import LINES, TOKENS

VOCABULARY = "vocabulary.json"


@dataclass(frozen=True)
class TokensConfig(Section):
    """[tokens]: how text becomes token ids."""

    most: int = setting(16, "characters of a line that are used, at most")
    batch_size: int = runtime(2, "rows per batch")


def wanted_tokens(run: Run[Any]) -> pa.Table:
    return run.inputs.rows(LINES).select(["line_id"]).sort_by("line_id")


def encode_tokens(run: Run[Any]) -> Iterator[pa.RecordBatch]:
    """Encode the pending lines; each row depends on its own line alone."""
    texts = dict(zip(*(run.inputs.rows(LINES)[name].to_pylist() for name in ("line_id", "text")), strict=True))
    pending = run.output.pending["line_id"].to_pylist()
    for start in range(0, len(pending), run.config.batch_size):
        if run.report.stop():
            return
        rows = [_row(line_id, texts[line_id][: run.config.most]) for line_id in pending[start : start + run.config.batch_size]]
        yield TOKENS.record_batch(rows)
        run.report.progress(min(start + run.config.batch_size, len(pending)), len(pending), "lines")


def _row(line_id: str, text: str) -> dict[str, object]:
    ids = np.array([ord(letter) for letter in text] or [0], np.int32)
    counts = np.array([(ids == each).sum() for each in ids])
    rarity = np.round(127 / counts).astype(np.int8)
    shape = [len(ids)]
    return {"line_id": line_id, "ids": ids, "rarity": rarity, "ids_shape": shape, "rarity_shape": shape, "scale": 1 / 127}


def write_vocabulary(run: Run[Any]) -> Iterator[pa.RecordBatch]:
    if run.output.pending.num_rows:
        text = json.dumps({"rows": run.output.stored.num_rows})

        def write(path: Path) -> None:
            path.write_text(text)

        run.output.write(VOCABULARY, write)
    yield from ()


STAGE = Stage(
    reads=(LINES,),
    writes=TOKENS,
    config=TokensConfig,
    wants=wanted_tokens,
    run=encode_tokens,
    finish=write_vocabulary,
    result=VOCABULARY,
)
