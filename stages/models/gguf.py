"""Reads GGUF files: the header strictly, then tensors as they are stored, each unpacked when it is first evaluated.

MLX's own reader holds all tensors unpacked and trusts the header. Source of the layouts: the format's specification.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import mlx.core as mx
import numpy as np

from stages.untrusted import open_regular

SUFFIX = ".gguf"
HEADER_BYTES = 100_000_000
COUNT = 1_000_000  # tensors or settings; also items of one list
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a setting's value, by its type
UINT32, STRING, LIST = 4, 8, 9  # types of a setting's value
ALIGNMENT = 32  # bytes, if no setting states it
DIMENSIONS = 4


@dataclass(frozen=True)
class Kind:
    name: str  # Q4_0
    values: int  # of a block
    size: int  # bytes of a block
    unpack: Callable[[mx.array], mx.array]  # uint8 (blocks, size) -> numbers (blocks, values)


@dataclass(frozen=True)
class Entry:
    kind: Kind
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file

    @property
    def size(self) -> int:
        return math.prod(self.shape) // self.kind.values * self.kind.size


def read_gguf(path: Path) -> dict[str, mx.array]:
    """Tensors by name. Raises ValueError if the file is damaged or a storage format is not supported."""
    entries = read_entries(path)
    data, found = np.memmap(path, np.uint8, "r"), {}
    for name, entry in entries.items():
        raw = mx.array(np.array(data[entry.start : entry.start + entry.size])).reshape(-1, entry.kind.size)
        found[name] = entry.kind.unpack(raw).reshape(entry.shape)
    return found


def read_entries(path: Path) -> dict[str, Entry]:
    """Where each tensor lies. Raises ValueError if the header is damaged, tensors overlap, or the file has another size."""
    return _read_header(path)[0]


def read_architecture(path: Path) -> str:
    """What the model is, such as "qwen3", in llama.cpp's words; "" if the file does not say it. ValueError as `read_entries`."""
    return _read_header(path)[1]


def _read_header(path: Path) -> tuple[dict[str, Entry], str]:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            entries, start, architecture = _header(file, size)
        except (struct.error, UnicodeDecodeError, OverflowError, KeyError, IndexError):
            raise ValueError(f"{path} is not a whole GGUF file: its header cannot be read; fetch it again") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    end = start
    for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
        if entry.start < end:
            raise ValueError(f"{path} is not a GGUF file: {name} overlaps the tensor before it")
        end = entry.start + entry.size
    # Writers pad the last tensor to the alignment.
    if not end <= size < end + 4096:
        word = "cut short" if size < end else "too long"
        raise ValueError(f"{path} is {word}: {size:,} bytes, its header says {end:,}; fetch it again")
    return entries, architecture


class _Header:
    """Reads one value of the header after another. Raises IndexError beyond the first `limit` bytes."""

    def __init__(self, file: BufferedReader, limit: int) -> None:
        self.file, self.limit = file, limit

    def take(self, count: int) -> bytes:
        if not 0 <= count <= self.limit - self.file.tell():
            raise IndexError
        return self.file.read(count)

    def number(self, form: str) -> int:
        found: int = struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]
        return found

    def count(self, most: int) -> int:
        found = self.number("Q")
        if found > most:
            raise IndexError
        return found

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def skip(self, kind: int, depth: int = 0) -> None:
        if kind == STRING:
            self.take(self.number("Q"))
        # SIZES has no lists: a third level raises KeyError, which bounds the recursion.
        elif kind == LIST and depth < 2:
            inner, count = self.number("I"), self.count(COUNT)
            if inner in SIZES:
                self.take(SIZES[inner] * count)
            else:
                for _ in range(count):
                    self.skip(inner, depth + 1)
        else:
            self.take(SIZES[kind])

    def settings(self, count: int) -> tuple[int, str]:
        """Pass over all settings: the alignment of the data and the name of the architecture, which two of them may state."""
        found, architecture = ALIGNMENT, ""
        for _ in range(count):
            key, kind = self.text(), self.number("I")
            if key == "general.alignment" and kind == UINT32:
                found = self.number("I")
            elif key == "general.architecture" and kind == STRING:
                architecture = self.text()
            else:
                self.skip(kind)
        if not 1 <= found <= 1 << 20:
            raise ValueError(f"general.alignment must be from 1 to 1,048,576, got {found:,}")
        return found, architecture

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        """(name, number of the kind, shape, offset in bytes from the start of the data)."""
        name, dimensions = self.text(), self.number("I")
        if not 1 <= dimensions <= DIMENSIONS:
            raise IndexError
        # GGUF lists the fastest axis first.
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        return name, self.number("I"), shape, self.number("Q")


def _header(file: BufferedReader, size: int) -> tuple[dict[str, Entry], int, str]:
    """(entries by name, first byte of the data, architecture). A damaged header raises errors of several types."""
    header = _Header(file, min(size, HEADER_BYTES))
    if header.take(4) != b"GGUF" or header.number("I") not in (2, 3):
        raise ValueError("it must be a GGUF file of version 2 or 3")
    tensors, settings = header.count(COUNT), header.count(COUNT)
    alignment, architecture = header.settings(settings)
    found = [header.tensor() for _ in range(tensors)]
    start = -(-file.tell() // alignment) * alignment
    entries = {name: _entry(name, kind, shape, start + offset, size) for name, kind, shape, offset in found}
    if len(entries) < len(found):
        raise IndexError  # two tensors of one name
    return entries, start, architecture


def _entry(name: str, kind: int, shape: tuple[int, ...], start: int, size: int) -> Entry:
    if kind not in KINDS:
        read = ", ".join(each.name for each in KINDS.values())
        raise ValueError(f"{name} is {OTHERS.get(kind, f'of kind {kind}')}, which is not read; read are {read}")
    # Every kind takes more than a quarter of a byte per value: a larger product cannot lie in the file.
    if min(shape) < 1 or shape[-1] % KINDS[kind].values or math.prod(shape) > 4 * size:
        raise ValueError(f"{name} cannot have the shape {shape}")
    return Entry(KINDS[kind], shape, start)


def _halves(raw: mx.array, at: int) -> mx.array:
    return mx.contiguous(raw[:, at : at + 2]).view(mx.float16).astype(mx.float32)


def _nibbles(raw: mx.array) -> mx.array:
    # The lower four bits of all bytes come first, then the upper ones.
    return mx.concatenate([raw & 15, raw >> 4], axis=-1)


def _q8_0(raw: mx.array) -> mx.array:
    return _halves(raw, 0) * mx.contiguous(raw[:, 2:]).view(mx.int8).astype(mx.float32)


def _q4_0(raw: mx.array) -> mx.array:
    return _halves(raw, 0) * (_nibbles(raw[:, 2:]).astype(mx.float32) - 8)


def _q4_1(raw: mx.array) -> mx.array:
    return _halves(raw, 0) * _nibbles(raw[:, 4:]).astype(mx.float32) + _halves(raw, 2)


def _scales_of_8(raw: mx.array) -> tuple[mx.array, mx.array]:
    # 12 bytes hold 8 scales and 8 offsets of 6 bits. Those of groups 0 to 3 are the lower bits of the first 8 bytes; those of
    # groups 4 to 7 have 4 bits in the last 4 bytes and 2 in the upper bits of the first 8.
    first, second, third = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = mx.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1).astype(mx.float32)
    offsets = mx.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1).astype(mx.float32)
    return (_halves(raw, 0) * scales)[..., None], (_halves(raw, 2) * offsets)[..., None]


def _q4_k(raw: mx.array) -> mx.array:
    scales, offsets = _scales_of_8(raw)
    values = _nibbles(raw[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32).astype(mx.float32)
    return (scales * values - offsets).reshape(-1, 256)


def _q5_k(raw: mx.array) -> mx.array:
    scales, offsets = _scales_of_8(raw)
    low = _nibbles(raw[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = (raw[:, None, 16:48] >> mx.arange(8, dtype=mx.uint8)[:, None]) & 1
    return (scales * (low + 16 * high).astype(mx.float32) - offsets).reshape(-1, 256)


def _q6_k(raw: mx.array) -> mx.array:
    low, high = raw[:, :128].reshape(-1, 2, 64), raw[:, 128:192].reshape(-1, 2, 1, 32)
    scales = mx.contiguous(raw[:, 192:208]).view(mx.int8).astype(mx.float32)[..., None]
    upper = (high >> mx.array([0, 2, 4, 6], mx.uint8)[:, None]) & 3
    values = _nibbles(low).reshape(-1, 2, 4, 32) | (upper << 4)
    return (_halves(raw, 208) * ((values.astype(mx.float32) - 32).reshape(-1, 16, 16) * scales).reshape(-1, 256)).reshape(-1, 256)


# Tests compare every kind with what MLX reads.
KINDS = {
    0: Kind("F32", 1, 4, lambda raw: raw.view(mx.float32)),
    1: Kind("F16", 1, 2, lambda raw: raw.view(mx.float16)),
    30: Kind("BF16", 1, 2, lambda raw: raw.view(mx.bfloat16)),
    8: Kind("Q8_0", 32, 34, _q8_0),
    2: Kind("Q4_0", 32, 18, _q4_0),
    3: Kind("Q4_1", 32, 20, _q4_1),
    12: Kind("Q4_K", 256, 144, _q4_k),
    13: Kind("Q5_K", 256, 176, _q5_k),
    14: Kind("Q6_K", 256, 210, _q6_k),
}
OTHERS = {6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS"}
OTHERS |= {19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}
