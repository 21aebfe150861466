"""How a table is described: its name, its key, its columns, and the tensors that its rows carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

# The Arrow type in which values of a tensor dtype are stored. NumPy and DuckDB have no bfloat16, so it is stored as 16-bit words.
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
    """A tensor that every row of a table carries, stored in an Arrow shard and read from there by memory map.

    A batch has the values as a flat list in the column `name`. A stored row has instead the columns `offset` and `nbytes`,
    which locate the values in the row's shard. The column `shape` is one of the table's own columns; the stage fills it.
    """

    name: str
    dtype: str  # a key of STORED_AS
    doc: str
    shape: str  # names of other columns, as above
    offset: str
    nbytes: str

    @property
    def kind(self) -> pa.DataType:
        """The Arrow type in which a value is stored, for example uint16 for bfloat16."""
        return STORED_AS[self.dtype]

    @property
    def field(self) -> pa.Field:
        """The column of a batch that holds the values: a list of `kind` per row."""
        kind = pa.list_(pa.field("item", self.kind, nullable=False))
        return pa.field(self.name, kind, nullable=False, metadata={"doc": self.doc})

    @property
    def locator(self) -> tuple[pa.Field, pa.Field]:
        """The columns of a stored row that locate the tensor in its shard: offset and size, bytes (int64)."""
        return (
            pa.field(self.offset, pa.int64(), nullable=False, metadata={"doc": f"where {self.name} starts in the shard, bytes"}),
            pa.field(self.nbytes, pa.int64(), nullable=False, metadata={"doc": f"size of {self.name}, bytes"}),
        )


def tensor(name: str = "tensor", dtype: str = "bfloat16", doc: str = "the values, 16-bit words") -> TensorColumn:
    """Describe a tensor column called `name` with values of `dtype`, a key of STORED_AS.

    Its shape and locator columns are called NAME_shape, NAME_offset and NAME_nbytes; for the name "tensor" they are called
    shape, byte_offset and nbytes. The shape column, a list of int32, must be one of the table's columns.
    """
    assert dtype in STORED_AS, f"{name}: dtype must be one of {', '.join(STORED_AS)}, got {dtype}"
    if name == "tensor":
        return TensorColumn(name, dtype, doc, "shape", "byte_offset", "nbytes")
    return TensorColumn(name, dtype, doc, f"{name}_shape", f"{name}_offset", f"{name}_nbytes")


def column(name: str, kind: pa.DataType, doc: str, *, null: bool = False, measured: bool = False, default: str = "") -> pa.Field:
    """Describe one column: its name, its Arrow type, and in `doc` what it holds and in which unit.

    `null` allows nulls. `measured` marks clock times and memory, in which two equal runs may differ. `default` is the value
    of rows that `TableSchema.table` is given without this column.
    """
    return pa.field(name, kind, nullable=null, metadata={"doc": doc, "measured": "yes" if measured else "", "default": default})


@dataclass(frozen=True)
class TableSchema:
    """The description of a table: its name, what a row is (`doc`), the columns that identify a row (`key`), all columns in order.

    `tensors` lists the tensors that every row carries: none, one or several. A table with tensors has one key column.
    `retains_dead_rows`: rows that are no longer wanted stay on disk, hidden from readers, until `latentmill clean`, because
    they are expensive to recompute. Tables with tensors always retain them.
    """

    name: str
    doc: str
    key: tuple[str, ...]
    columns: tuple[pa.Field, ...]
    tensors: tuple[TensorColumn, ...] = ()
    retains_dead_rows: bool = False

    def __post_init__(self) -> None:
        """Check that the columns named by the key and by the tensors exist, and that no column has the name of another."""
        names = [field.name for field in (*self.batch, *self.locator)]
        needed = {*self.key, *(each.shape for each in self.tensors)}
        assert needed <= {field.name for field in self.columns}, f"{self.name}: its key or a tensor's shape is not a column"
        assert len(set(names)) == len(names), f"{self.name}: two columns have the same name: {', '.join(names)}"
        assert len(self.key) == 1 or not self.tensors, f"{self.name}: a table with tensors has one key column, got {self.key}"

    @property
    def batch(self) -> pa.Schema:
        """The schema of the record batches that a stage yields: the columns, then one list of values per tensor."""
        return pa.schema([*self.columns, *(each.field for each in self.tensors)])

    @property
    def locator(self) -> tuple[pa.Field, ...]:
        """The columns of a stored row that locate its tensors: shard, then offset and size of each. Empty without tensors."""
        return (SHARD, *(field for each in self.tensors for field in each.locator)) if self.tensors else ()

    @property
    def stored(self) -> pa.Schema:
        """The schema of the rows that readers see: the columns, then the locator columns."""
        return pa.schema([*self.columns, *self.locator])

    @property
    def compared(self) -> list[str]:
        """Names of the columns in which two equal runs must agree: all that are not `measured`."""
        return [f.name for f in self.columns if not (f.metadata or {}).get(b"measured")]

    def table(self, rows: list[dict[str, Any]]) -> pa.Table:
        """Build an Arrow table of the schema `batch` from one dict per row. A missing or unknown column is an AssertionError."""
        names = set(self.batch.names)
        defaults = {f.name: f.metadata[b"default"].decode() for f in self.columns if f.metadata.get(b"default")}
        rows = [defaults | row for row in rows]
        for row in rows:
            assert set(row) == names, f"{self.name}: columns {sorted(set(row) ^ names)} are missing or unknown"
        return pa.Table.from_pylist(rows, schema=self.batch)
