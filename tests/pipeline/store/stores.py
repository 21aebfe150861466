"""Two small tables for the tests of the store: one with tensors, one without. A row's values follow from its number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.store.table import TableFolder
from pipeline.store.writer import Writer
from schemas.table import TableSchema, column, tensor

WORDS = 500  # in a tensor: 1000 bytes

VECTORS = TableSchema(
    name="vectors",
    doc="A tensor table.",
    key=("name",),
    tensors=(tensor(),),
    columns=(
        column("name", pa.string(), "the key"),
        column("number", pa.int32(), "what the tensor is full of"),
        column("shape", pa.list_(pa.int32()), "tensor shape"),
        column("remark", pa.string(), "something or nothing", null=True),
    ),
)
NOTES = TableSchema(
    name="notes",
    doc="A table of rows alone.",
    key=("page", "line"),
    columns=(
        column("page", pa.int32(), "the key"),
        column("line", pa.int32(), "the key"),
        column("text", pa.string(), "some words"),
        column("remark", pa.string(), "something or nothing", null=True),
    ),
)


def name_of(number: int) -> str:
    return f"row-{number:05d}"


def vectors(*numbers: int, add: int = 0, words: int = WORDS) -> pa.RecordBatch:
    """Rows named after their numbers, each with a tensor full of its number (plus `add`)."""
    values = np.repeat(np.array([n + add for n in numbers], np.uint16), words)
    offsets = np.arange(len(numbers) + 1, dtype=np.int32) * words
    return pa.record_batch(
        {
            "name": [name_of(n) for n in numbers],
            "number": pa.array([n + add for n in numbers], pa.int32()),
            "shape": pa.array([[2, words // 2]] * len(numbers), pa.list_(pa.int32())),
            "remark": pa.array([None if n % 2 else "even" for n in numbers], pa.string()),
            "tensor": pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)).cast(VECTORS.batch.field("tensor").type),
        }
    )


def notes(*numbers: int, text: str = "text") -> pa.RecordBatch:
    rows = [{"page": n // 10, "line": n % 10, "text": f"{text} {n}", "remark": None if n % 2 else "even"} for n in numbers]
    return pa.RecordBatch.from_pylist(rows, schema=NOTES.batch)


def names(*numbers: int) -> pa.Table:
    """The rows of VECTORS that a stage wants."""
    return pa.table({"name": pa.array([name_of(n) for n in numbers], pa.string())})


def written(folder: Path, *numbers: int, shard_bytes: int = 5000) -> TableFolder:
    """A finished tensor table of those rows, five to a shard."""
    table = TableFolder(folder, VECTORS)
    with Writer(table, {"stage": "vectors"}, shard_bytes=shard_bytes) as writer:
        for number in numbers:
            writer.append(vectors(number))
        writer.finish(None, {})
    return table


def lances(table: TableFolder, pattern: str) -> list[Path]:
    """Files of the Lance table, the newest manifest first."""
    return sorted((table.folder / "rows.lance").glob(pattern))


def lines(table: TableFolder) -> list[str]:
    """The texts of NOTES."""
    texts: list[str] = table.rows()["text"].to_pylist()
    return texts


def numbers(rows: pa.Table) -> list[int]:
    return [int(name.removeprefix("row-")) for name in rows["name"].to_pylist()]


def check_tensors(table: TableFolder, add: int = 0) -> None:
    """Every row that readers see has its own tensor, whole."""
    reader = table.tensors()
    for row in table.rows().to_pylist():
        tensor = reader.read(row["name"])
        assert tensor.shape == tuple(row["shape"])
        assert np.all(tensor == row["number"])


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file but the lock, with size and time of change."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}
