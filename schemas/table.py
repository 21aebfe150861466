"""The description of one table: its name, its key, its columns, and the tensors that a row may carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

# How the values of a tensor are stored. NumPy and DuckDB have no bfloat16, so bfloat16 is kept as 16-bit words.
STORED_AS = {
    "bfloat16": pa.uint16(),
    "float16": pa.uint16(),
    "float32": pa.float32(),
    "int32": pa.int32(),
    "uint16": pa.uint16(),
    "int8": pa.int8(),
    "uint8": pa.uint8(),
}
SHARD = pa.field("shard", pa.string(), nullable=False, metadata={"doc": "file under shards/ that holds the row and its tensors"})


@dataclass(frozen=True)
class TensorColumn:
    """One tensor of a row, stored in an Arrow shard and read from there by memory map.

    A batch carries the values in the column `name`, as a flat list. A stored row carries instead where they lie: the
    columns `offset` and `nbytes`. The column `shape` belongs to the row itself and is written by the stage.
    """

    name: str
    dtype: str  # a key of STORED_AS
    doc: str
    shape: str
    offset: str
    nbytes: str

    @property
    def kind(self) -> pa.DataType:
        """The Arrow type of one stored value."""
        return STORED_AS[self.dtype]

    @property
    def field(self) -> pa.Field:
        """The column of a batch: a list of values."""
        kind = pa.list_(pa.field("item", self.kind, nullable=False))
        return pa.field(self.name, kind, nullable=False, metadata={"doc": self.doc})

    @property
    def locator(self) -> tuple[pa.Field, pa.Field]:
        """The two columns of a stored row that say where in its shard the tensor lies."""
        return (
            pa.field(self.offset, pa.int64(), nullable=False, metadata={"doc": f"where {self.name} starts in the shard, bytes"}),
            pa.field(self.nbytes, pa.int64(), nullable=False, metadata={"doc": f"size of {self.name}, bytes"}),
        )


def tensor(name: str = "tensor", dtype: str = "bfloat16", doc: str = "the values, 16-bit words") -> TensorColumn:
    """A tensor column. Its locator columns are byte_offset and nbytes; any name but "tensor" is put before them."""
    assert dtype in STORED_AS, f"{name}: no tensor is stored as {dtype}"
    if name == "tensor":
        return TensorColumn(name, dtype, doc, "shape", "byte_offset", "nbytes")
    return TensorColumn(name, dtype, doc, f"{name}_shape", f"{name}_offset", f"{name}_nbytes")


def column(name: str, kind: pa.DataType, doc: str, *, null: bool = False, measured: bool = False, default: str = "") -> pa.Field:
    """One column of a table.

    `doc` says what it holds, with its unit. `measured` marks clock times and memory, in which two equal runs may differ.
    `default` is the value of a row that is built without this column.
    """
    return pa.field(name, kind, nullable=null, metadata={"doc": doc, "measured": "yes" if measured else "", "default": default})


@dataclass(frozen=True)
class TableSchema:
    """One table: its name, the columns that identify a row (`key`), and all columns in order.

    `tensors` lists the tensors that every row carries; a table has none, one or several.
    `retains_dead_rows`: rows that are no longer wanted stay on disk, hidden, until `latentmill clean`, because they are
    expensive to recompute. Tables with tensors always retain them.
    """

    name: str
    doc: str
    key: tuple[str, ...]
    columns: tuple[pa.Field, ...]
    tensors: tuple[TensorColumn, ...] = ()
    retains_dead_rows: bool = False

    @property
    def batch(self) -> pa.Schema:
        """The schema of the record batches that a stage yields: the columns, then one list per tensor."""
        return pa.schema([*self.columns, *(each.field for each in self.tensors)])

    @property
    def locator(self) -> tuple[pa.Field, ...]:
        """The columns of a stored row that say where its tensors lie; none for a table without tensors."""
        return (SHARD, *(field for each in self.tensors for field in each.locator)) if self.tensors else ()

    @property
    def stored(self) -> pa.Schema:
        """The schema of the rows that readers see: the columns, then the locator."""
        return pa.schema([*self.columns, *self.locator])

    @property
    def compared(self) -> list[str]:
        """Names of the columns in which two equal runs must agree."""
        return [f.name for f in self.columns if not (f.metadata or {}).get(b"measured")]

    def table(self, rows: list[dict[str, Any]]) -> pa.Table:
        """The rows as an Arrow table of the schema `batch`. A missing column, an unknown column or a wrong type is an error."""
        names = set(self.batch.names)
        defaults = {f.name: f.metadata[b"default"].decode() for f in self.columns if f.metadata.get(b"default")}
        rows = [defaults | row for row in rows]
        for row in rows:
            assert set(row) == names, f"{self.name}: columns {sorted(set(row) ^ names)} are missing or unknown"
        return pa.Table.from_pylist(rows, schema=self.batch)
