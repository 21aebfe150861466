"""Frozen weights: packed in 8 or 4 bits and unpacked each time that a block is computed, or kept on disk until then."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import shutil
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import mlx.core as mx

from stages import kernels

Arrays = dict[str, mx.array]  # by name
Bits = Literal[16, 8, 4]  # bits per weight; 16 means not packed
BITS: tuple[Bits, ...] = get_args(Bits)
GROUP = 64  # weights of a row that share a scale and an offset
UNPACKED_CHUNK = 1 << 28  # bytes of a weight that are unpacked at once; FLUX.2 dev's largest Linear has 0.68 GB


class QuantizedWeight(NamedTuple):
    """A packed matrix; a tuple, which mx.compile accepts as an argument."""

    packed: mx.array  # uint32, (outputs, inputs * bits / 32)
    scales: mx.array  # (outputs, inputs / 64)
    offsets: mx.array  # (outputs, inputs / 64)

    @property
    def bits(self) -> int:
        return 32 * self.packed.shape[-1] // (GROUP * self.scales.shape[-1])

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs), as unpacked."""
        return self.scales.shape[0], self.scales.shape[1] * GROUP

    def dense(self) -> mx.array:
        return mx.dequantize(*self, group_size=GROUP, bits=self.bits)


Weight = mx.array | QuantizedWeight


def pack(weight: mx.array, bits: int) -> QuantizedWeight:
    """Raises ValueError for bits other than 8 and 4, or a shape that is not packable."""
    if bits == 16 or bits not in BITS:
        raise ValueError(f"base_bits must be 16 (not packed), 8 or 4, got {bits}")
    if not is_packable(weight.shape):
        raise ValueError(f"a packed weight must be a matrix with rows a multiple of {GROUP} wide, got shape {weight.shape}")
    packed = QuantizedWeight(*mx.quantize(weight, group_size=GROUP, bits=bits))
    # At once, so that the caller can free the original: loading peaks at the packed size plus one weight.
    mx.eval(*packed)
    return packed


def pack_if_possible(weight: mx.array, bits: int) -> Weight:
    return pack(weight, bits) if bits < 16 and is_packable(weight.shape) else weight


def is_packable(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and shape[-1] % GROUP == 0


def unpacked(weight: Weight) -> mx.array:
    return weight.dense() if isinstance(weight, QuantizedWeight) else weight


def select_rows(weight: Weight, rows: slice) -> Weight:
    if rows == slice(None):
        return weight
    return weight[rows] if isinstance(weight, mx.array) else QuantizedWeight(*(array[rows] for array in weight))


def row_chunks(weight: Weight, tokens: int = 1) -> list[slice]:
    """Chunks of outputs: at most UNPACKED_CHUNK bytes, and on Metal what one kernel can multiply with `tokens` inputs."""
    total, inputs = weight.shape
    most = kernels.most_outputs(tokens, inputs)
    if isinstance(weight, QuantizedWeight):
        unpacked = max(1, UNPACKED_CHUNK // (inputs * weight.scales.dtype.size))
        most = min(most or unpacked, unpacked)
    return kernels.slices(total, most)


def unpack_after(weight: QuantizedWeight, after: mx.array) -> QuantizedWeight:
    """The same weight, but MLX unpacks it only once `after` is computed."""
    return weight._replace(packed=mx.depends([weight.packed], [after])[0])


# Weights on disk, in temporary files of one process: one file per weight, read when it is needed

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
        weakref.finalize(owner, _delete_folder, self.folder)


def read(weight: Any) -> Weight:
    return weight.read() if isinstance(weight, StoredWeight) else weight


def read_all(weights: Mapping[str, Any]) -> dict[str, Weight]:
    return {name: read(weight) for name, weight in weights.items()}


def _is_running(number: str) -> bool:
    try:
        with contextlib.suppress(PermissionError):
            os.kill(int(number), 0)
    except (ProcessLookupError, ValueError):
        return False
    return True


def _delete_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    # The parent, if this was its last folder.
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
