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
    """The description of a tensor column. Such a column holds one tensor per row of a table. `name` is the name of the
    column, and `doc` says what it holds. `dtype` is the type of the tensor's values, a key of `STORED_AS` such as
    "bfloat16". A stage yields the values of a tensor as a flat list. The attributes `shape`, `offset`, `nbytes` and
    `checksum` are the names of four more columns, which describe the tensor.

    The stage fills the column `shape`. The store writes the values into a shard (an Arrow file with tensors). It fills
    the columns `offset`, `nbytes` and `checksum`: the position in the shard, the size, and the xxh3 of the bytes.
    Position and size are in bytes.
    """

    name: str
    dtype: str  # a key of STORED_AS
    doc: str
    shape: str  # names of other columns, as above
    offset: str
    nbytes: str
    checksum: str

    @property
    def kind(self) -> pa.DataType:
        """The Arrow type in which the values of the tensor are stored. For example, bfloat16 is stored as uint16."""
        return STORED_AS[self.dtype]

    @property
    def field(self) -> pa.Field:
        """The Arrow field of this column in the record batches that a stage yields. Each row holds the values of one
        tensor as a flat list. The items have the Arrow type `self.kind`.
        """
        kind = pa.list_(pa.field("item", self.kind, nullable=False))
        return pa.field(self.name, kind, nullable=False, metadata={"doc": self.doc})

    @property
    def locator(self) -> tuple[pa.Field, pa.Field, pa.Field]:
        """The three Arrow fields that say where the tensor of a row is stored, all int64. The first is the tensor's
        offset in the shard (an Arrow file with tensors), in bytes. The second is the tensor's size in bytes. The third
        is the tensor's checksum. They are filled when the tensor is written to disk, not by the stage.
        """
        return (
            pa.field(self.offset, pa.int64(), nullable=False, metadata={"doc": f"where {self.name} starts in the shard, bytes"}),
            pa.field(self.nbytes, pa.int64(), nullable=False, metadata={"doc": f"size of {self.name}, bytes"}),
            self.checksum_field,
        )

    @property
    def checksum_field(self) -> pa.Field:
        """The Arrow field of the tensor's checksum: the 64-bit xxh3 of its bytes, as a signed number. It is null in a row
        that an earlier version of this program wrote, until `latentmill verify` fills it in.
        """
        doc = f"xxh3 of the bytes of {self.name}, checked when they are read; null until verify has read an old row"
        return pa.field(self.checksum, pa.int64(), nullable=True, metadata={"doc": doc})


def tensor(name: str = "tensor", dtype: str = "bfloat16", doc: str = "the values, 16-bit words") -> TensorColumn:
    """Return the description of a tensor column. `name` is the name of the column. `dtype` is the type of the tensor's
    values, a key of `STORED_AS` such as "bfloat16". `doc` says what the values are. For the name "x", four more columns
    hold the tensor's shape, position, size and checksum: `x_shape`, `x_offset`, `x_nbytes` and `x_checksum`. Raises
    AssertionError if `dtype` is unknown.

    For the name "tensor", the four columns are called `shape`, `byte_offset`, `nbytes` and `checksum`. The caller must
    add the shape column to the columns of the table, as a list of int32.
    """
    assert dtype in STORED_AS, f"{name}: dtype must be one of {', '.join(STORED_AS)}, got {dtype}"
    if name == "tensor":
        return TensorColumn(name, dtype, doc, "shape", "byte_offset", "nbytes", "checksum")
    return TensorColumn(name, dtype, doc, f"{name}_shape", f"{name}_offset", f"{name}_nbytes", f"{name}_checksum")


def column(
    name: str, kind: pa.DataType, doc: str, *, null: bool = False, measured: bool = False, default: str = "", later: bool = False
) -> pa.Field:
    """Return the Arrow field of the column `name`. `kind` is the Arrow type. `doc` says what the column holds, and in
    which unit. If `null` is True, nulls are allowed. If `measured` is True, the values differ between equal runs, as
    clock times do. `default` is the text that a new row gets if the stage gives no value for this column; "" means no
    default. If `later` is True, older tables may lack the column.

    `TableSchema.table` fills in `default`. Only columns of strings can have a default. If `default` is empty and
    `later` is False, every row that a stage gives to `TableSchema.table` must have the column. A column with `later`
    allows nulls, `TableSchema.table` fills in null, and the column is not part of the recipe. So tables without the
    column are kept.
    """
    marks = {"measured": "yes" if measured else "", "default": default, "later": "yes" if later else ""}
    return pa.field(name, kind, nullable=null or later, metadata={"doc": doc, **marks})


@dataclass(frozen=True)
class TableSchema:
    """The description of a table. `name` is the table's name. `doc` says what a row is. `key` holds the names of the
    columns that identify a row. `columns` holds all columns in order. `tensors` lists the tensors that every row has.
    Raises AssertionError if these fields do not fit together, for example if two columns have one name.

    A table with tensors has exactly one key column, and a column for each tensor's shape. `artifact` is the name of the
    column with the path of a row's own file. It is "" if rows have no files. The path is relative to the folder
    `artifacts`. A row whose file is missing or damaged counts as missing.

    `retains_dead_rows` says what happens to rows that no setting needs any more. If it is True, they are kept on disk
    until `latentmill clean`, hidden from readers. If it is False, the next finished run deletes them. Set it to True if
    the rows are expensive to recompute. Tables with tensors always retain such rows.
    """

    name: str
    doc: str
    key: tuple[str, ...]
    columns: tuple[pa.Field, ...]
    tensors: tuple[TensorColumn, ...] = ()
    retains_dead_rows: bool = False
    artifact: str = ""

    def __post_init__(self) -> None:
        """Raise AssertionError if the fields of the schema do not fit together. `columns` must contain every key column
        and the shape column of every tensor. If `artifact` is not "", `columns` must contain the column of this name.
        No two columns may have the same name. A table with tensors must have exactly one key column.
        """
        names = [field.name for field in (*self.batch, *self.locator)]
        needed = {*self.key, *(each.shape for each in self.tensors), *filter(None, [self.artifact])}
        assert needed <= {field.name for field in self.columns}, (
            f"{self.name}: its key, a tensor's shape or the artifact is not a column"
        )
        assert len(set(names)) == len(names), f"{self.name}: two columns have the same name: {', '.join(names)}"
        assert len(self.key) == 1 or not self.tensors, f"{self.name}: a table with tensors has one key column, got {self.key}"

    @property
    def batch(self) -> pa.Schema:
        """The Arrow schema of the record batches that a stage yields. The columns come first, then one list of values per
        tensor.
        """
        return pa.schema([*self.columns, *(each.field for each in self.tensors)])

    @property
    def locator(self) -> tuple[pa.Field, ...]:
        """The Arrow fields that say where the tensors of a row are stored. The first field is the file name of the
        shard (an Arrow file with tensors). Each tensor then has three fields: its offset in the shard and its size, both
        in bytes, and its checksum. The tuple is empty if the table has no tensors.
        """
        return (SHARD, *(field for each in self.tensors for field in each.locator)) if self.tensors else ()

    @property
    def shard(self) -> pa.Schema:
        """The Arrow schema of a shard (an Arrow file with tensors). The columns come first, then the values of each
        tensor as a list, then one checksum per tensor.
        """
        return pa.schema([*self.batch, *(each.checksum_field for each in self.tensors)])

    @property
    def stored(self) -> pa.Schema:
        """The Arrow schema of the rows on disk, as readers see them. The columns come first, then the fields that locate
        the tensors.
        """
        return pa.schema([*self.columns, *self.locator])

    @property
    def recorded(self) -> dict[str, str]:
        """The Arrow type of each column and tensor, as a dict from name to text. The recipe of a table contains this
        dict. A recipe records what decides the rows of a table, such as the settings. Columns marked `later` are left
        out.
        """
        return {f.name: str(f.type) for f in self.batch if not (f.metadata or {}).get(b"later")}

    @property
    def compared(self) -> list[str]:
        """The names of the columns whose values must be equal in two equal runs. Columns marked `measured`, such as
        clock times and memory, are left out.
        """
        return [f.name for f in self.columns if not (f.metadata or {}).get(b"measured")]

    def table(self, rows: list[dict[str, Any]]) -> pa.Table:
        """Return an Arrow table with the schema `self.batch`. `rows` holds one dict per row, from column name to value.
        A column with a default, or one marked `later`, may be left out. Raises AssertionError if another column is
        missing, or if a name is unknown.
        """
        names = set(self.batch.names)
        defaults: dict[str, str | None] = {f.name: None for f in self.columns if f.metadata.get(b"later")}
        defaults |= {f.name: f.metadata[b"default"].decode() for f in self.columns if f.metadata.get(b"default")}
        rows = [defaults | row for row in rows]
        for row in rows:
            assert set(row) == names, f"{self.name}: columns {sorted(set(row) ^ names)} are missing or unknown"
        return pa.Table.from_pylist(rows, schema=self.batch)
