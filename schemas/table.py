"""A table describes itself: its name, its key, and columns that say what they hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

# Where a row's tensor lies: appended to the columns of a tensor table when the runner stores it.
LOCATOR = (
    pa.field("part", pa.string(), nullable=False, metadata={"doc": "file under parts/ that holds the row and its tensor"}),
    pa.field("byte_offset", pa.int64(), nullable=False, metadata={"doc": "where the tensor starts in the part, bytes"}),
    pa.field("nbytes", pa.int64(), nullable=False, metadata={"doc": "the tensor's size, bytes"}),
)
# How a tensor travels in a batch and lies in a part: 16-bit words in row-major order, bfloat16 unless `dtype` says otherwise.
TENSOR = pa.field(
    "tensor",
    pa.list_(pa.field("item", pa.uint16(), nullable=False)),
    nullable=False,
    metadata={"doc": "the values, 16-bit words"},
)


def column(name: str, kind: pa.DataType, doc: str, *, null: bool = False, measured: bool = False, default: str = "") -> pa.Field:
    """One column. `doc` names the unit. `measured` marks clocks and memory: two equal runs may differ in it.

    `default` is what a row holds that does not say otherwise.
    """
    return pa.field(name, kind, nullable=null, metadata={"doc": doc, "measured": "yes" if measured else "", "default": default})


@dataclass(frozen=True)
class TableSchema:
    """One table: the noun that names it, the columns that identify a row, and all columns in order.

    `tensor` is True where every row also carries a 16-bit tensor: batches then end in a column `tensor`
    (list of uint16), which the runner puts into Arrow parts, keeping a locator in the row. `retains_dead_rows` is True where,
    as in every tensor table, a row that nobody wants any more is kept, out of sight, until `clean`: it is dear to make.
    """

    name: str
    doc: str
    key: tuple[str, ...]
    columns: tuple[pa.Field, ...]
    tensor: bool = False
    retains_dead_rows: bool = False

    @property
    def batch(self) -> pa.Schema:
        """The schema of the record batches that the stage yields."""
        return pa.schema([*self.columns, TENSOR] if self.tensor else self.columns)

    @property
    def stored(self) -> pa.Schema:
        """The schema of the rows that readers see."""
        return pa.schema([*self.columns, *LOCATOR] if self.tensor else self.columns)

    @property
    def compared(self) -> list[str]:
        """The columns in which two equal runs must agree."""
        return [f.name for f in self.columns if not (f.metadata or {}).get(b"measured")]

    def table(self, rows: list[dict[str, Any]]) -> pa.Table:
        """Rows as a table of this schema; a missing column or a wrong type is an error."""
        names = set(self.batch.names)
        defaults = {f.name: f.metadata[b"default"].decode() for f in self.columns if f.metadata.get(b"default")}
        rows = [defaults | row for row in rows]
        for row in rows:
            assert set(row) == names, f"{self.name}: columns {sorted(set(row) ^ names)} are missing or unknown"
        return pa.Table.from_pylist(rows, schema=self.batch)
