"""Reading a finished table from Python: its rows as Arrow, its tensors as NumPy arrays."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa

from pipeline.store.reader import ShardReader
from pipeline.store.table import TableFolder
from schemas.table import TensorColumn

VIEWS = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}  # dtypes stored as 16-bit words


class Table:
    """One table of a project, as the last finished run left it. ValueError if no run has finished."""

    def __init__(self, folder: TableFolder) -> None:
        self.schema = folder.schema
        self.folder = folder.folder
        self._folder = folder
        self._rows = folder.rows()

    def __len__(self) -> int:
        """The number of rows."""
        return int(self._rows.num_rows)

    def __repr__(self) -> str:
        """Name, number of rows and what a row is."""
        return f"<{self.schema.name}: {len(self)} rows. {self.schema.doc}>"

    def to_arrow(self) -> pa.Table:
        """All rows, without their tensors."""
        return self._rows

    def __getitem__(self, key: str) -> Any:
        """The tensor of the row with that key: a read-only NumPy array over the memory-mapped file.

        `mx.array(...)` makes an MLX array of it. If a row of this table has several tensors, a dict of arrays by name.
        KeyError for a key that the table does not have.
        """
        if not self.schema.tensors:
            raise TypeError(f"the rows of {self.schema.name} carry no tensors; use to_arrow()")
        found = {tensor.name: self._array(key, tensor) for tensor in self.schema.tensors}
        return found if len(found) > 1 else next(iter(found.values()))

    def _array(self, key: str, tensor: TensorColumn) -> np.ndarray:
        values = self._reader.read(key, tensor.name)
        return values.view(VIEWS[tensor.dtype]) if tensor.dtype in VIEWS else values

    @functools.cached_property
    def _reader(self) -> ShardReader:
        return self._folder.tensors()
