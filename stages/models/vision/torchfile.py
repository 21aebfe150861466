"""Tensors of a file that PyTorch saved before 1.6, as NumPy arrays, without PyTorch and without running what a pickle may name.

Such a file is five pickles one after another (a magic number, the protocol, facts about the machine, the object, the names
of its storages), then each storage: its number of elements and their bytes. A tensor is a view of a storage.
"""

from __future__ import annotations

import pickle
import sys
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

MAGIC = 0x1950A86A20F9469CFC6C
DTYPES = {"FloatStorage": "<f4", "HalfStorage": "<f2", "LongStorage": "<i8", "IntStorage": "<i4"}
PICKLES = 5


@dataclass(frozen=True)
class Storage:
    """A run of elements, known by its name until its bytes are read."""

    name: str
    dtype: str
    size: int  # elements


@dataclass(frozen=True)
class View:
    """A tensor: where it begins in a storage, its shape and its strides, all in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Restricted(pickle.Unpickler):
    """An unpickler that builds views of storages and ordered dictionaries, and refuses any other name."""

    def find_class(self, module: str, name: str) -> Any:
        """What a pickle's name stands for here."""
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, shape, strides, *rest: View(storage, offset, tuple(shape), tuple(strides))
        if module == "torch" and name in DTYPES:
            return name
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no plain file of tensors does")

    def persistent_load(self, pid: Any) -> Storage:
        """A storage: ("storage", its kind, its name, the device, its size, nothing)."""
        return Storage(pid[2], DTYPES[pid[1]], pid[4])


def read(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of the file's dictionary. ValueError for a file that is not of this form, or not whole."""
    assert sys.byteorder == "little"
    with path.open("rb") as file:
        try:
            magic, _, _, views, names = (Restricted(file).load() for _ in range(PICKLES))
        except (pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read as a dictionary of tensors: {error}") from None
        if magic != MAGIC or not all(isinstance(view, View) for view in views.values()):
            raise ValueError(f"{path} is not a dictionary of tensors as PyTorch saved them before 1.6")
        known = {view.storage.name: view.storage for view in views.values()}
        data = {name: _elements(file, path, known[name]) for name in names}
    return {name: _tensor(view, data[view.storage.name]) for name, view in views.items()}


def _elements(file: BinaryIO, path: Path, storage: Storage) -> np.ndarray:
    """The next storage in the file."""
    kind = np.dtype(storage.dtype)
    size = int.from_bytes(file.read(8), "little")
    raw = file.read(storage.size * kind.itemsize)
    if size != storage.size or len(raw) < storage.size * kind.itemsize:
        raise ValueError(f"{path} is cut short; install its package again")
    return np.frombuffer(raw, kind)


def _tensor(view: View, elements: np.ndarray) -> np.ndarray:
    strides = tuple(stride * elements.itemsize for stride in view.strides)
    return np.lib.stride_tricks.as_strided(elements[view.offset :], view.shape, strides, writeable=False)
