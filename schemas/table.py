"""The description of a table: its name, key, columns, and the tensors that its rows carry."""

from __future__ import annotations

from collections.abc import Iterable
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
Among = tuple[str, pa.Array]  # a column and values: the rows that have one of them
SHARD = pa.field("shard", pa.string(), nullable=False, metadata={"doc": "file under shards/ that holds the row and its tensors"})


@dataclass(frozen=True)
class TensorColumn:
    """One tensor per row, stored in a shard and found through four columns that `shape` to `checksum` name."""

    name: str
    dtype: str  # a key of STORED_AS
    doc: str
    shape: str  # names of four more columns; the stage fills this one, the store the other three
    offset: str  # where the tensor starts in the shard, bytes
    nbytes: str
    checksum: str  # xxh3 of the bytes

    @property
    def kind(self) -> pa.DataType:
        """The Arrow type in which the values are stored, for example uint16 for bfloat16."""
        return STORED_AS[self.dtype]

    @property
    def field(self) -> pa.Field:
        """The column in the batches that a stage yields: the tensor as a flat list, of `kind`."""
        kind = pa.list_(pa.field("item", self.kind, nullable=False))
        return pa.field(self.name, kind, nullable=False, metadata={"doc": self.doc})

    @property
    def locator(self) -> tuple[pa.Field, pa.Field, pa.Field]:
        """The int64 fields offset, nbytes and checksum, which the store fills."""
        return (
            pa.field(self.offset, pa.int64(), nullable=False, metadata={"doc": f"where {self.name} starts in the shard, bytes"}),
            pa.field(self.nbytes, pa.int64(), nullable=False, metadata={"doc": f"size of {self.name}, bytes"}),
            self.checksum_field,
        )

    @property
    def checksum_field(self) -> pa.Field:
        """The 64-bit xxh3 as a signed number."""
        doc = f"xxh3 of the bytes of {self.name}, checked when they are read"
        return pa.field(self.checksum, pa.int64(), nullable=False, metadata={"doc": doc})


def tensor(name: str = "tensor", dtype: str = "bfloat16", doc: str = "the values, 16-bit words") -> TensorColumn:
    """A tensor column; the table must declare its shape column, a list of int32."""
    assert dtype in STORED_AS, f"{name}: dtype must be one of {', '.join(STORED_AS)}, got {dtype}"
    # The tensor of latents and embeddings: its columns carry no prefix.
    if name == "tensor":
        return TensorColumn(name, dtype, doc, "shape", "byte_offset", "nbytes", "checksum")
    return TensorColumn(name, dtype, doc, f"{name}_shape", f"{name}_offset", f"{name}_nbytes", f"{name}_checksum")


def column(
    name: str,
    kind: pa.DataType,
    doc: str,
    *,
    null: bool = False,
    measured: bool = False,
    default: str = "",
    unrecorded: bool = False,
    long: bool = False,
) -> pa.Field:
    """The Arrow field of a column; `doc` says what it holds, and the unit.

    `measured`: differs between equal runs, as clock times do. `default`: what `record_batch` fills in for a string column, "" for
    none. `unrecorded`: not part of the recipe; may be null, and is if a row does not say it. `long`: a text that its own
    stage does not need. It is not compressed, the writer of its table does not read it, and a run that changes few rows of such a
    table writes no others.
    """
    marks = {"measured": "yes" if measured else "", "default": default, "unrecorded": "yes" if unrecorded else ""}
    marks |= {"long": "yes"} if long else {}
    # Lance's own key. Compressing the texts of 72,000 units takes 0.7 s of CPU at each edit of a file, and saves 60 MB.
    lance = {"lance-encoding:compression": "none"} if long else {}
    return pa.field(name, kind, nullable=null or unrecorded, metadata={"doc": doc, **marks, **lance})


# Columns that tables of several pipelines have: the state of a file, and the costs of a training step.
FILE_STATE = (
    column("bytes", pa.int64(), "file size, bytes"),
    column("mtime_ns", pa.int64(), "modification time of the file, nanoseconds since 1970"),
    column(
        "inode",
        pa.int64(),
        "inode number of the file; a file with the same path, size, modification time and inode is not read again",
    ),
)
STEP_COSTS = (
    column("seconds", pa.float32(), "wall time of the step, seconds", measured=True),
    column("read_seconds", pa.float32(), "time of the step that was spent reading rows from disk, seconds", measured=True),
    column("peak_bytes", pa.int64(), "peak memory of MLX up to this step, bytes", measured=True),
)


@dataclass(frozen=True)
class TableSchema:
    """The description of a table. Raises AssertionError if its fields do not fit together."""

    name: str
    doc: str  # what a row is
    key: tuple[str, ...]  # columns that identify a row; exactly one if there are tensors
    columns: tuple[pa.Field, ...]
    tensors: tuple[TensorColumn, ...] = ()
    # True: rows that no setting needs stay on disk, hidden, until `latentmill clean`. False: the next finished run deletes them.
    # For rows that are expensive to compute; rows with tensors always stay.
    retains_dead_rows: bool = False
    artifact: str = ""  # column with the path, below artifacts/, of the row's own file; without an intact file the row is missing

    def __post_init__(self) -> None:
        names = [field.name for field in (*self.batch, *self.locator)]
        needed = {*self.key, *(each.shape for each in self.tensors), *filter(None, [self.artifact])}
        assert needed <= {field.name for field in self.columns}, (
            f"{self.name}: its key, a tensor's shape or the artifact is not a column"
        )
        assert len(set(names)) == len(names), f"{self.name}: two columns have the same name: {', '.join(names)}"
        assert self.short == tuple(self.stored.names) or not (self.tensors or self.artifact or self.retains_dead_rows), (
            f"{self.name}: a table with long columns has no tensors or files, and keeps no dead rows"
        )
        assert len(self.key) == 1 or not self.tensors, f"{self.name}: a table with tensors has one key column, got {self.key}"

    @property
    def batch(self) -> pa.Schema:
        """The record batches that a stage yields: the columns, then each tensor as a list."""
        return pa.schema([*self.columns, *(each.field for each in self.tensors)])

    @property
    def locator(self) -> tuple[pa.Field, ...]:
        """Shard, then offset, nbytes and checksum of each tensor; empty without tensors."""
        return (SHARD, *(field for each in self.tensors for field in each.locator)) if self.tensors else ()

    @property
    def shard(self) -> pa.Schema:
        """A shard: the columns, each tensor as a list, then the checksums."""
        return pa.schema([*self.batch, *(each.checksum_field for each in self.tensors)])

    @property
    def stored(self) -> pa.Schema:
        """The rows on disk as readers see them: the columns, then where the tensors are."""
        return pa.schema([*self.columns, *self.locator])

    @property
    def short(self) -> tuple[str, ...]:
        """The columns of `stored` that are not marked `long`."""
        return tuple(field.name for field in self.stored if not (field.metadata or {}).get(b"long"))

    @property
    def recorded(self) -> dict[str, str]:
        """Name -> Arrow type of each column and tensor, as the recipe records them; without those marked `unrecorded`."""
        return {f.name: str(f.type) for f in self.batch if not (f.metadata or {}).get(b"unrecorded")}

    def record_batch(self, rows: Iterable[dict[str, Any]]) -> pa.RecordBatch:
        """Raises AssertionError if a row lacks a column (but for `default` and `unrecorded`) or has an unknown one."""
        names = set(self.batch.names)
        defaults: dict[str, str | None] = {f.name: None for f in self.columns if f.metadata.get(b"unrecorded")}
        defaults |= {f.name: f.metadata[b"default"].decode() for f in self.columns if f.metadata.get(b"default")}
        rows = [defaults | row for row in rows]
        for row in rows:
            assert set(row) == names, f"{self.name}: columns {sorted(set(row) ^ names)} are missing or unknown"
        return pa.RecordBatch.from_pylist(rows, schema=self.batch)

    def select(self, rows: list[dict[str, Any]], names: Iterable[str]) -> pa.Table:
        return pa.Table.from_pylist(rows, schema=pa.schema([self.batch.field(name) for name in names]))
