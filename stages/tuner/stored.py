"""Weights of blocks that stay on disk: one file for each weight, read when the weight is needed.

The files are temporary. They belong to one process and are deleted with the model that reads them.
"""

from __future__ import annotations

import os
import platform
import shutil
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from stages.tuner.quantize import QuantizedWeight, Weight

WHOLE = "weight"  # name of the array of a weight that is not packed


@dataclass(frozen=True)
class StoredWeight:
    """A weight matrix (outputs, inputs) in a file. `file` is a safetensors file. `shape` is the shape of the unpacked
    weight.
    """

    file: Path
    shape: tuple[int, int]

    def read(self) -> Weight:
        """Return the weight, packed (quantised) if it was stored packed. MLX reads the file when the weight is first
        computed with. Every call returns new arrays, so that their memory is freed after their last use.
        """
        arrays: Any = mx.load(str(self.file))
        return arrays[WHOLE] if WHOLE in arrays else QuantizedWeight(**arrays)


class WeightFolder:
    """A folder for the weights of one model in this process. `store(name, weight)` writes a weight. The folder is
    deleted when the object given to `belongs_to` is freed, or when the process ends.
    """

    def __init__(self, parent: Path) -> None:
        """Create an empty folder in `parent`. Folders in `parent` that ended processes of this machine have left are
        deleted.
        """
        for folder in parent.glob(f"{platform.node()}-*") if parent.is_dir() else ():
            if not _is_running(folder.name.rpartition("-")[2]):
                shutil.rmtree(folder, ignore_errors=True)
        self.folder = parent / f"{platform.node()}-{os.getpid()}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def store(self, name: str, weight: Weight) -> StoredWeight:
        """Write a weight to a file and return the stored weight. `name` is the full name of the weight. Raises OSError
        if the disk is full.
        """
        file = self.folder / f"{name}.safetensors"
        arrays = weight._asdict() if isinstance(weight, QuantizedWeight) else {WHOLE: weight}
        mx.save_safetensors(str(file), arrays)
        if file.stat().st_size <= sum(array.nbytes for array in arrays.values()):  # MLX ignores a full disk
            raise OSError(f"{file} could not be written in full: free disk space, or set stream_blocks = false")
        rows, columns = weight.shape
        return StoredWeight(file, (rows, columns))

    def belongs_to(self, owner: Any) -> None:
        """Delete the folder when the object `owner` is freed, or when the process ends."""
        weakref.finalize(owner, _delete, self.folder)


def read(weight: Any) -> Weight:
    """Return a weight as arrays. A `StoredWeight` is read from disk when it is computed with. Any other weight is returned as it
    is.
    """
    return weight.read() if isinstance(weight, StoredWeight) else weight


def read_all(weights: Mapping[str, Any]) -> dict[str, Weight]:
    """Return the weights of a block by name, those on disk as arrays that are read when they are computed with."""
    return {name: read(weight) for name, weight in weights.items()}


def _is_running(number: str) -> bool:
    try:
        os.kill(int(number), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True


def _delete(folder: Path) -> None:
    """Delete the folder of a process, and the folder around it if it is empty then."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.rmdir()
    except OSError:
        return
