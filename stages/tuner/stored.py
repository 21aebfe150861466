"""Weights of blocks that stay on disk, in temporary files of one process: one file per weight, read when it is needed."""

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
    file: Path  # safetensors
    shape: tuple[int, int]  # (outputs, inputs), as unpacked

    def read(self) -> Weight:
        """New lazy arrays, whose memory is freed after their last use."""
        arrays: Any = mx.load(str(self.file))
        return arrays[WHOLE] if WHOLE in arrays else QuantizedWeight(**arrays)


class WeightFolder:
    def __init__(self, parent: Path) -> None:
        # Folders that killed processes of this machine have left. Other machines may share the disk: their folders stay.
        for folder in parent.glob(f"{platform.node()}-*") if parent.is_dir() else ():
            if not _is_running(folder.name.rpartition("-")[2]):
                shutil.rmtree(folder, ignore_errors=True)
        self.folder = parent / f"{platform.node()}-{next(_NUMBERS)}-{os.getpid()}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def store(self, name: str, weight: Weight) -> StoredWeight:
        """Raises OSError if the disk is full."""
        file = self.folder / f"{name}.safetensors"
        arrays = weight._asdict() if isinstance(weight, QuantizedWeight) else {WHOLE: weight}
        mx.save_safetensors(str(file), arrays)
        if file.stat().st_size <= sum(array.nbytes for array in arrays.values()):  # MLX ignores a full disk
            raise OSError(f"{file} could not be written in full: free disk space, or set stream_blocks = false")
        rows, columns = weight.shape
        return StoredWeight(file, (rows, columns))

    def belongs_to(self, owner: Any) -> None:
        # Also runs when the process ends.
        weakref.finalize(owner, _delete, self.folder)


def read(weight: Any) -> Weight:
    return weight.read() if isinstance(weight, StoredWeight) else weight


def read_all(weights: Mapping[str, Any]) -> dict[str, Weight]:
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
    shutil.rmtree(folder, ignore_errors=True)
    # The parent, if this was its last folder.
    try:
        folder.parent.rmdir()
    except OSError:
        return
