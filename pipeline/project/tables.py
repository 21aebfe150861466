"""A finished table as the Python API shows it: rows as Arrow, tensors as NumPy arrays."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa

from pipeline.store.shards import ShardReader
from pipeline.store.table import TableFolder

AS_FLOATS = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}  # dtypes stored as 16-bit words


class Table:
    """A read-only snapshot of a table after its last finished run: `table.to_arrow()` has the rows, `table[key]` the tensors.

    The files of rows lie in `table.folder / "artifacts"`. Raises ValueError if no run of the stage has finished.
    """

    def __init__(self, folder: TableFolder) -> None:
        self.schema = folder.schema
        self.folder = folder.folder
        self._rows = folder.rows()

    def __len__(self) -> int:
        return int(self._rows.num_rows)

    def __repr__(self) -> str:
        return f"<{self.schema.name}: {len(self)} rows. {self.schema.doc}>"

    def to_arrow(self) -> pa.Table:
        return self._rows

    def __getitem__(self, key: str) -> Any:
        """The row's tensor, an array over the mapped file; of several, a dict by name. Raises ValueError for an unknown key."""
        if not self.schema.tensors:
            raise TypeError(f"the rows of {self.schema.name} have no tensors; use to_arrow()")
        try:
            arrays = {each.name: self._reader.read(key, each.name) for each in self.schema.tensors}
        except KeyError:
            raise ValueError(f"{self.schema.name} has no row {key!r}; to_arrow()[{self.schema.key[0]!r}] lists them") from None
        arrays |= {t.name: arrays[t.name].view(AS_FLOATS[t.dtype]) for t in self.schema.tensors if t.dtype in AS_FLOATS}
        return arrays if len(arrays) > 1 else next(iter(arrays.values()))

    @functools.cached_property
    def _reader(self) -> ShardReader:
        return ShardReader(self.folder, self._rows, self.schema)
