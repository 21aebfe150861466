"""The stage `index`: the vectors of all units in one memory-mapped matrix, and their words in a full-text index.

The matrix and the full-text index are artifacts. Their names hold a digest of the rows, so that rows and artifacts of two
states
of the project are never used together.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from schemas.retrieval import INDEX, SOURCES, TOKENS, UNITS, VECTORS
from stages.memory import Forecast, Outlook
from stages.retrieval.memory import VALUE_BYTES, encoder_sizes
from stages.retrieval.search import lexical, maxsim
from stages.retrieval.texts import BASE
from stages.run import Run
from stages.settings import COUNT, WHOLE, Section, runtime, selects
from stages.stage import Stage

Row = dict[str, Any]

KEPT = ("unit_id", "encoder", "vector_id", "file")  # the columns on which the freshness of a row depends
LEXICAL_BYTES, LEXICAL_SHARE = 20_000, 0.85  # of the full-text index: bytes in all, and per byte of the words; about
MATRIX, WORDS, PARTITIONS = "vectors-{}.npy", "words-{}.lance", "partitions-{}.lance"  # artifacts, by the digest of the rows


@dataclass(frozen=True)
class IndexConfig(Section):
    """The section [index]: which vectors are searched, and how."""

    encoder: Literal["tuned", "base"] = selects(
        "tuned", "the encoder whose vectors are searched: tuned, or the base if nothing was tuned; or base"
    )
    exact_tokens: int = selects(
        4_000_000,
        "vectors up to which every one is compared; beyond, candidates come from a partitioned index: 0 always uses it",
        bounds=(0, WHOLE[1]),
    )
    batch_size: int = runtime(2048, "units per record batch", bounds=COUNT)


def wanted_index(run: Run[IndexConfig]) -> pa.Table:
    rows = [{name: row[name] for name in KEPT} for row in run.once(_rows)]
    return INDEX.select(rows, KEPT)


def _rows(run: Run[IndexConfig]) -> list[Row]:
    """One row per unit in document order. Raises ValueError if a unit has no vectors of the chosen encoder."""
    columns = ["unit_id", "path", "qualified_name", "first_line", "last_line", "signature", "text_id", "words"]
    units = run.inputs.rows(UNITS).select(columns).to_pylist()
    files = dict(zip(*(run.inputs.rows(SOURCES)[name].to_pylist() for name in ("path", "file")), strict=True))
    vectors = run.inputs.rows(VECTORS).select(["vector_id", "encoder", "text_id", "role", "count"]).to_pylist()
    chosen = choose_encoder({row["encoder"] for row in vectors}, run.config.encoder)
    of_text = {row["text_id"]: row for row in vectors if row["encoder"] == chosen and row["role"] == "document"}
    if missing := [unit for unit in units if unit["text_id"] not in of_text]:
        raise ValueError(f"{len(missing)} units have no vectors, such as {missing[0]['path']}: run make vectors")
    rows = []
    for unit in sorted(units, key=document_order):
        found = of_text[unit["text_id"]]
        vector = {"vector_id": found["vector_id"], "count": found["count"], "encoder": chosen}
        rows.append({**unit, **vector, "file": files[unit["path"]]})
    return rows


def document_order(row: Row) -> tuple[Any, ...]:
    """The sort key of rows of `units` and `index`: the order of the matrix."""
    return row["path"], row["first_line"], row["unit_id"]


def choose_encoder(encoders: set[str], wanted: str) -> str:
    """The tuned encoder, or the base. Raises ValueError if the choice has no vectors, or several are tuned."""
    tuned = sorted(encoders - {BASE})
    if wanted == BASE or not tuned:
        if BASE not in encoders:
            raise ValueError("the table vectors holds no vectors of the base: run make vectors, or set index.encoder to tuned")
        return BASE
    if len(tuned) > 1:
        names = ", ".join(name[:8] for name in tuned)
        raise ValueError(f"the table vectors holds vectors of {len(tuned)} tuned encoders ({names}): run make vectors")
    return tuned[0]


def list_units(run: Run[IndexConfig]) -> Iterator[pa.RecordBatch]:
    pending = set(run.output.pending["unit_id"].to_pylist())
    rows = [row for row in run.once(_rows) if row["unit_id"] in pending] if pending else []
    for start in range(0, len(rows), run.config.batch_size):
        if run.report.stop():
            return
        yield INDEX.record_batch(rows[start : start + run.config.batch_size])


def digest(rows: list[Row]) -> str:
    """16 hex digits over the unit_ids and vector_ids in document order."""
    lines = (f"{row['unit_id']} {row['vector_id']}" for row in sorted(rows, key=document_order))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def write_index(run: Run[IndexConfig]) -> Iterator[pa.RecordBatch]:
    """Write the artifacts that are missing, and delete those of an earlier index."""
    rows = run.once(_rows)
    stored = {tuple(row[name] for name in KEPT) for row in run.output.stored.select(list(KEPT)).to_pylist()}
    # The run was stopped before all rows were stored.
    if not all(tuple(row[name] for name in KEPT) in stored for row in rows):
        return
    name, reader = digest(rows), run.inputs.tensors(VECTORS)
    tokens = sum(row["count"] for row in rows)
    width = reader.read(rows[0]["vector_id"]).shape[1]

    def vectors() -> Iterator[np.ndarray]:
        for number, row in enumerate(rows, 1):
            yield reader.read(row["vector_id"]).view(np.float16)
            if number % 256 == 0:
                reader.ahead(())  # release what was read
                run.report.progress(number, len(rows), "units")

    wanted = {
        WORDS.format(name): lambda path: lexical.build(path, [row["words"] for row in rows]),
        MATRIX.format(name): lambda path: maxsim.write_matrix(path, vectors(), tokens, width),
    }
    if tokens > run.config.exact_tokens:
        wanted[PARTITIONS.format(name)] = lambda path: maxsim.build_partitions(path, vectors(), width, tokens)
    for artifact, write in wanted.items():
        if not (run.output.artifacts / artifact).exists():
            run.output.write(artifact, write)
            run.report.say(f"{artifact}: {len(rows)} units, {tokens} vectors")
    _delete_others(run.output.artifacts, set(wanted))
    yield from ()


def _delete_others(folder: Path, wanted: set[str]) -> None:
    for path in folder.iterdir():
        if path.name not in wanted and path.suffix in (".npy", ".lance"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def forecast(outlook: Outlook) -> Forecast | None:
    """The matrix, the full-text index and, for a large project, the partitioned index; None if the tables are not built."""
    units, rows = outlook.rows(UNITS), outlook.rows(TOKENS)
    if units is None or rows is None:
        return None
    lengths = dict(zip(rows["text_id"].to_pylist(), rows["count"].to_pylist(), strict=True))
    tokens = sum(lengths.get(text_id, 0) for text_id in units["text_id"].to_pylist())
    partitioned = tokens > outlook.sections["index"].exact_tokens
    vectors = VALUE_BYTES * encoder_sizes(outlook).dimensions * tokens
    words = sum(len(text.encode()) for text in units["words"].to_pylist())
    files = vectors * (1 + partitioned) + LEXICAL_BYTES + int(LEXICAL_SHARE * words)
    return Forecast(0, file_bytes=files, how=f"{tokens} vectors" + (", partitioned" if partitioned else ""))


STAGE = Stage(
    reads=(VECTORS, UNITS, SOURCES),
    writes=INDEX,
    config=IndexConfig,
    wants=wanted_index,
    run=list_units,
    finish=write_index,
    forecast=forecast,
    divisible=False,
)
