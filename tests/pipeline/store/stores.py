"""Small tables for the tests of the store: with one, two and no tensors. The values of a row follow from its number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.store import table as store_table
from pipeline.store.table import TableFolder, Writer
from schemas.table import TableSchema, column, tensor
from tests.pipeline.forks import note

WORDS = 500  # values in a tensor of VECTORS: 1000 bytes

VECTORS = TableSchema(
    name="vectors",
    doc="A table with one tensor.",
    key=("name",),
    tensors=(tensor(),),
    columns=(
        column("name", pa.string(), "the key"),
        column("number", pa.int32(), "every value of the tensor"),
        column("shape", pa.list_(pa.int32()), "tensor shape"),
        column("remark", pa.string(), "some text or null", null=True),
    ),
)
PAIRS = TableSchema(
    name="pairs",
    doc="A table with two tensors of different types and sizes.",
    key=("name",),
    tensors=(tensor("ids", "int32", "token ids"), tensor("signs", "int8", "signs")),
    columns=(
        column("name", pa.string(), "the key"),
        column("number", pa.int32(), "every value of ids; modulo 100, every value of signs"),
        column("ids_shape", pa.list_(pa.int32()), "shape of ids"),
        column("signs_shape", pa.list_(pa.int32()), "shape of signs"),
    ),
)
NOTES = TableSchema(
    name="notes",
    doc="A table without tensors.",
    key=("page", "line"),
    columns=(
        column("page", pa.int32(), "the key"),
        column("line", pa.int32(), "the key"),
        column("text", pa.string(), "some words"),
        column("remark", pa.string(), "some text or null", null=True),
    ),
)
ARTICLES = TableSchema(
    name="articles",
    doc="A table with a long column.",
    key=("name",),
    columns=(
        column("name", pa.string(), "the key"),
        column("edition", pa.int32(), "how often it was written"),
        column("text", pa.string(), "many words", long=True),
    ),
)


FILES = TableSchema(
    name="files",
    doc="A table whose rows name files.",
    key=("name",),
    columns=(column("name", pa.string(), "the key"), column("path", pa.string(), "the file of the row")),
    artifact="path",
)


def flip(path: Path, place: int = -20) -> None:
    """Change one bit of a file; `place` counts from its end if it is negative."""
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(bytes(content))


def files(folder: Path, *numbers: int, inside: str = "") -> TableFolder:
    """A finished table with the schema FILES; each row has a small file in the folder `inside` of the artifacts."""
    table = TableFolder(folder, FILES)
    with Writer(table, {}) as writer:
        for number in numbers:
            name = f"{inside}{number}.txt"
            writer.write_artifact(name, lambda path, text=f"text {number}": path.write_text(text) and None)
            writer.append(pa.RecordBatch.from_pylist([{"name": str(number), "path": name}], schema=FILES.batch))
        writer.finish(None, {})
    return table


def name_of(number: int) -> str:
    return f"row-{number:05d}"


def vectors(*numbers: int, add: int = 0, words: int = WORDS) -> pa.RecordBatch:
    """Rows of VECTORS named after their numbers; all values of a row's tensor are its number plus `add`."""
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


def pairs(*numbers: int, add: int = 0) -> pa.RecordBatch:
    """Rows of PAIRS named after their numbers: ids has 100 + number % 3 values, signs 3 times as many."""
    rows = []
    for number in numbers:
        value, count = number + add, 100 + number % 3
        row = {"name": name_of(number), "number": value, "ids_shape": [count], "signs_shape": [3, count]}
        rows.append(row | {"ids": [value] * count, "signs": [value % 100] * 3 * count})
    return pa.RecordBatch.from_pylist(rows, schema=PAIRS.batch)


def notes(*numbers: int, text: str = "text") -> pa.RecordBatch:
    """Rows of NOTES, whose key and text follow from their numbers."""
    rows = [{"page": n // 10, "line": n % 10, "text": f"{text} {n}", "remark": None if n % 2 else "even"} for n in numbers]
    return pa.RecordBatch.from_pylist(rows, schema=NOTES.batch)


def articles(*numbers: int, edition: int = 1) -> pa.RecordBatch:
    """Rows of ARTICLES named after their numbers."""
    rows = [{"name": name_of(n), "edition": edition, "text": f"text {n} of {edition}"} for n in numbers]
    return pa.RecordBatch.from_pylist(rows, schema=ARTICLES.batch)


BATCHES: dict[str, tuple[TableSchema, Callable[..., pa.RecordBatch]]] = {
    "vectors": (VECTORS, vectors),
    "pairs": (PAIRS, pairs),
    "notes": (NOTES, notes),
    "articles": (ARTICLES, articles),
}


def names(*numbers: int) -> pa.Table:
    return pa.table({"name": pa.array([name_of(n) for n in numbers], pa.string())})


def run(table: TableFolder, *batches: pa.RecordBatch, wanted: pa.Table | None = None, **options: int) -> pa.Table:
    """Append the batches and finish. Returns what was stored before."""
    with Writer(table, {"stage": table.schema.name}, **options) as writer:
        stored = writer.stored
        for batch in batches:
            writer.append(batch)
        writer.finish(wanted, {})
    return stored


def written(folder: Path, *numbers: int, shard_bytes: int = 5000, schema: TableSchema = VECTORS) -> TableFolder:
    table = TableFolder(folder, schema)
    run(table, *(BATCHES[schema.name][1](number) for number in numbers), shard_bytes=shard_bytes)
    return table


def lance_files(table: TableFolder, pattern: str) -> list[Path]:
    """Files of the Lance dataset, the newest manifest first."""
    return sorted((table.folder / "rows.lance").glob(pattern))


def texts(table: TableFolder) -> list[str]:
    found: list[str] = table.rows()["text"].to_pylist()
    return found


def numbers(rows: pa.Table) -> list[int]:
    return [int(name.removeprefix("row-")) for name in rows["name"].to_pylist()]


def check_tensors(table: TableFolder) -> None:
    """Every tensor of every row that readers see has the shape and the values of that row."""
    reader = table.tensors()
    for row in table.rows().to_pylist():
        for each in table.schema.tensors:
            values = reader.read(row["name"], each.name)
            assert values.shape == tuple(row[each.shape])
            assert np.all(values == (row["number"] % 100 if each.dtype == "int8" else row["number"]))


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file but the lock, with its size and time of change."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def add(folder: str, name: str, count: int) -> None:
    """Add rows to a table, from where it ends; note how many are committed and how many are finished.

    Every third row ends a commit, every tenth a run. After every second run, rows are written again and the table is cleaned.
    """
    schema, make = BATCHES[name]
    store_table.REVISED = 1.0  # so few rows would all be written again
    with Writer(TableFolder(Path(folder), schema), {}, shard_bytes=3000) as writer:
        first, finished = writer.stored.num_rows, 0
        for number in range(first, first + count):
            writer.append(make(number))
            if number % 3 == 2:
                writer.flush()
            if number % 10 == 9:
                writer.finish(None, {"number": number + 1})
                finished = number + 1
            if number % 20 == 19:
                writer.append(make(*range(number - 9, number, 2)))
                writer.finish(None, {"number": number + 1})
                writer.collect()
            note([writer.stored.num_rows, finished])
