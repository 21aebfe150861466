"""Read the tensors of a file that PyTorch saved, without PyTorch and without running code from the file.

Such a file is a ZIP archive of a pickle and of one file per storage. Only the names that a dict of tensors needs are unpickled.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

STORAGES = {"FloatStorage": np.float32, "HalfStorage": np.float16}


class _Storage:
    def __init__(self, name: str) -> None:
        self.dtype = STORAGES[name]


class _Reader(pickle.Unpickler):
    """Unpickles a dict of tensors as NumPy arrays. Raises UnpicklingError for a name that such a dict does not need."""

    def __init__(self, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(archive.open(f"{folder}/data.pkl"))
        self.archive, self.folder = archive, folder

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if module == "torch" and name in STORAGES:
            return _Storage(name)
        # Any other name could run code.
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")

    def persistent_load(self, pid: Any) -> np.ndarray:
        _, storage, key, _, count = pid
        data = self.archive.read(f"{self.folder}/data/{key}")
        return np.frombuffer(data, storage.dtype, count)


def _rebuild(storage: np.ndarray, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> np.ndarray:
    contiguous = tuple(int(np.prod(size[n + 1 :], dtype=np.int64)) for n in range(len(size)))
    if tuple(stride) != contiguous:
        raise pickle.UnpicklingError("a tensor in it is not contiguous")
    count = int(np.prod(size, dtype=np.int64))
    return storage[offset : offset + count].reshape(size)


def read_torch_file(path: Path) -> dict[str, mx.array]:
    """As float32. Raises ValueError if the file is damaged or holds anything but float32 and float16 tensors."""
    try:
        with zipfile.ZipFile(path) as archive:
            folder = next(name.rsplit("/", 1)[0] for name in archive.namelist() if name.endswith("/data.pkl"))
            found = _Reader(archive, folder).load()
        return {str(name): mx.array(np.asarray(value, np.float32)) for name, value in found.items()}
    except (zipfile.BadZipFile, pickle.UnpicklingError, StopIteration, KeyError, ValueError, AttributeError, EOFError) as error:
        raise ValueError(f"{path} is not a file of tensors that PyTorch saved: {error or 'it is damaged'}") from None
