"""Weights of blocks that stay on disk: one file for each weight, read when the weight is needed.

The files are temporary. They belong to one process and are deleted with the model that reads them.
"""

from __future__ import annotations

import itertools
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
_NUMBERS = itertools.count()  # of the folders of this process


@dataclass(frozen=True)
class StoredWeight:
    """A weight matrix that lies in a file. `file` is the path of a safetensors file. `shape` is (outputs, inputs). A
    packed (quantised) weight has the shape that it has unpacked.
    """

    file: Path
    shape: tuple[int, int]

    def read(self) -> Weight:
        """Return the weight as arrays. It is packed (quantised) if it was stored packed. The file is read later, when MLX first
        computes with the weight.

        Every call returns new arrays. Their memory is freed after their last use.
        """
        arrays: Any = mx.load(str(self.file))
        return arrays[WHOLE] if WHOLE in arrays else QuantizedWeight(**arrays)


class WeightFolder:
    """A temporary folder for the weights of one model. `store(name, weight)` writes a weight into it. The folder is
    deleted when the process ends. It is deleted earlier if the object given to `belongs_to` is freed.
    """

    def __init__(self, parent: Path) -> None:
        """Create an empty folder inside the folder `parent`. Every object has a folder of its own.

        Folders in `parent` that ended processes of this machine have left there are deleted.
        """
        for folder in parent.glob(f"{platform.node()}-*") if parent.is_dir() else ():
            if not _is_running(folder.name.rpartition("-")[2]):
                shutil.rmtree(folder, ignore_errors=True)
        self.folder = parent / f"{platform.node()}-{next(_NUMBERS)}-{os.getpid()}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def store(self, name: str, weight: Weight) -> StoredWeight:
        """Write `weight` to a file of the folder. Return a `StoredWeight`, which can read it again. `name` is the full
        name of the weight in the model; the file is named after it. Raises OSError if the disk is full.
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
    """Return a weight as arrays. `weight` may be a `StoredWeight`: a weight in a file. Its file is read later, when MLX
    first computes with the arrays. Any other weight is returned as it is.
    """
    return weight.read() if isinstance(weight, StoredWeight) else weight


def read_all(weights: Mapping[str, Any]) -> dict[str, Weight]:
    """Return all `weights` of a block as arrays, in a dict by name. Some of `weights` may lie in files. A file is read
    later, when MLX first computes with its arrays.
    """
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
    """Delete `folder`. Then delete its parent folder too, if that is empty."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.rmdir()
    except OSError:
        return
