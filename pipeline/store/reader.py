"""Random access to the tensors of a table's rows by memory map."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.store.checksums import tensor_checksum
from pipeline.store.shards import shard_damage, shards_folder, tensor_ends
from schemas.table import TableSchema, TensorColumn

MAPPED_SHARDS = 64  # shards kept open; macOS allows a process 256 open files


@dataclass(frozen=True)
class _Locators:
    """The places of one tensor column's values in the shards (Arrow files with tensors). `dtype` is the NumPy dtype of
    the values. Every other field is an array with one entry per row. `offset` is where the values start in the shard,
    and `nbytes` is their length, both in bytes. `shapes` holds each tensor's shape as a list. `checksum` is the xxh3 of
    the values. `checked` is False for a row without a checksum.
    """

    dtype: np.dtype
    offset: np.ndarray
    nbytes: np.ndarray
    shapes: pa.Array
    checksum: np.ndarray
    checked: np.ndarray


class ShardReader:
    """A reader of the tensors of one table, in any order. `table` is the table's folder. `rows` are the rows whose
    tensors can be read, as `TableFolder.rows` returns them. `schema` is the table's schema. The shards (Arrow files
    with tensors) are mapped into memory. Raises ValueError if a shard of these rows is missing or cut short.

    A page of a file is read from disk when its values are first used. `ahead` releases pages.
    """

    def __init__(self, table: Path, rows: pa.Table, schema: TableSchema) -> None:
        self._table, self._name = table, schema.name
        self._row = {key: row for row, key in enumerate(rows[schema.key[0]].to_pylist())}
        shards = rows["shard"].combine_chunks().dictionary_encode()
        self._shards: list[str] = shards.dictionary.to_pylist()
        self._shard = shards.indices.to_numpy()
        self._tensors = {tensor.name: _locators(rows, tensor) for tensor in schema.tensors}
        self._first = schema.tensors[0].name
        self._maps: dict[str, mmap.mmap] = {}  # the least recently used first
        self._read: set[int] = set()
        self._check(rows, schema)

    def read(self, key: str, name: str = "") -> np.ndarray:
        """Return one tensor of the row with the key `key`, as a NumPy array in the tensor's shape. `name` is the name
        of the tensor column; "" means the table's first one. The dtypes bfloat16 and float16 are returned as uint16,
        with the same bits. The array is a read-only view of the file.

        Do not use the array after the next call of the method `ahead`. Raises KeyError if there is no such row or
        tensor column. Raises ValueError if the row has no tensor; the column `rejected` of the row holds the reason.
        Raises ValueError if the values differ from the row's checksum. A row that an earlier version of this program
        wrote has no checksum, and is not checked.
        """
        row, tensor = self._row[key], self._tensors[name or self._first]
        count = int(tensor.nbytes[row]) // tensor.dtype.itemsize
        if not count:
            raise ValueError(f"{self._table}: row {key} has no tensor; its column `rejected` says why")
        self._read.add(row)
        flat = np.frombuffer(self._map(row), tensor.dtype, count, int(tensor.offset[row]))
        if tensor.checked[row] and tensor_checksum(flat) != tensor.checksum[row]:
            raise ValueError(self._damage(key, row))
        return flat.reshape(tensor.shapes[row].as_py())

    def _damage(self, key: str, row: int) -> str:
        """Return the error message for a tensor that differs from its checksum. `key` is the key of the tensor's row.
        `row` is the position of this row in the reader, from 0.
        """
        shard = shards_folder(self._table) / self._shards[self._shard[row]]
        return f"{self._name}: the tensor of row {key} in {shard} differs from its checksum; run: latentmill verify --repair"

    def ahead(self, keys: Iterable[str]) -> None:
        """Start reading the tensors of the rows with the given keys from disk. The memory of all rows that were read before is
        released, so arrays from earlier calls of `read` become invalid.
        """
        for row in self._read:
            if self._shards[self._shard[row]] in self._maps:
                self._advise(row, "MADV_DONTNEED")
        self._read.clear()
        for key in keys:
            self._advise(self._row[key], "MADV_WILLNEED")

    def _check(self, rows: pa.Table, schema: TableSchema) -> None:
        """Raise ValueError if a shard (a file with tensors) is missing or too short. A shard is too short if it ends
        before the last tensor of `rows`. `schema` is the table's schema.
        """
        ends = pa.table({"shard": rows["shard"], "end": tensor_ends(rows, schema)})
        needed = ends.group_by("shard").aggregate([("end", "max")])
        for name, end in zip(needed["shard"].to_pylist(), needed["end_max"].to_pylist(), strict=True):
            path = shards_folder(self._table) / name
            if damage := shard_damage(path, end):
                raise ValueError(f"{schema.name}: {path} {damage}; run: latentmill verify --repair")

    def _map(self, row: int) -> mmap.mmap:
        """Return the memory map of the shard with the tensors of a row. `row` is the row's position. At most `MAPPED_SHARDS`
        shards stay open.
        """
        name = self._shards[self._shard[row]]
        mapped = self._maps.pop(name, None)
        if mapped is None:
            with (shards_folder(self._table) / name).open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if hasattr(mmap, "MADV_RANDOM"):  # without it every page fault reads megabytes ahead
                with suppress(OSError):
                    mapped.madvise(mmap.MADV_RANDOM)
        self._maps[name] = mapped
        while len(self._maps) > MAPPED_SHARDS:
            del self._maps[next(iter(self._maps))]  # a view that is still in use keeps its own map
        return mapped

    def _advise(self, row: int, hint: str) -> None:
        """Pass `hint`, such as "MADV_WILLNEED", to the system for the pages of a row's tensors. `row` is the row's position."""
        if not hasattr(mmap, hint):
            return
        for tensor in self._tensors.values():
            start, size = int(tensor.offset[row]), int(tensor.nbytes[row])
            if not size:
                continue
            mapped = self._map(row)
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            length = math.ceil((start + size - first) / mmap.PAGESIZE) * mmap.PAGESIZE
            with suppress(OSError):  # only a hint
                mapped.madvise(getattr(mmap, hint), first, min(length, len(mapped) - first))


def _locators(rows: pa.Table, tensor: TensorColumn) -> _Locators:
    dtype = np.dtype(tensor.kind.to_pandas_dtype())
    offset, nbytes = rows[tensor.offset].to_numpy(), rows[tensor.nbytes].to_numpy()
    checksum = rows[tensor.checksum]
    values = pc.fill_null(checksum, 0).to_numpy()
    return _Locators(dtype, offset, nbytes, rows[tensor.shape].combine_chunks(), values, checksum.is_valid().to_numpy())
