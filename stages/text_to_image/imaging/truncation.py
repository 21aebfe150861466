"""Lengths and sizes from the headers of image files: whether a file is cut short, and how many pixels an AVIF has."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from typing import BinaryIO

TIFF_BYTES = {3: 2, 4: 4, 5: 8, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}  # bytes per value of a TIFF field type; 1 for all others
HEADER = 4096  # bytes at the start of an AVIF file in which its sizes are looked for
TAIL = 64  # bytes at the end of a file in which its end marker must lie


def is_truncated(file: BinaryIO) -> bool:
    """The headers name more bytes than there are, or the end marker is missing. False for an unknown format. Moves the
    position.

    Only for a file that failed to decode: a good one may lack its end marker.
    """
    try:
        size = file.seek(0, io.SEEK_END)
    except OSError:
        return False
    head = peek(file, 0, 16).ljust(16, b"\0")
    for offset, signature, check in CONTAINERS:
        if head[offset:].startswith(signature):
            return check(file, size)
    return False


def peek(file: BinaryIO, offset: int, count: int) -> bytes:
    """Bytes at `offset`, and back to the start; b"" if the file cannot be read."""
    try:
        file.seek(offset)
        data = file.read(count)
        file.seek(0)
    except OSError:
        return b""
    return data


def avif_size(file: BinaryIO) -> tuple[int, int] | None:
    """(width, height) of the largest image in an AVIF header, before rotation; None for other files. Seeks to the start."""
    head = peek(file, 0, HEADER)
    if head[4:8] != b"ftyp" or b"avif" not in head[8:64]:
        return None
    boxes = (part[4:12] for part in head.split(b"ispe")[1:])  # after the box's name: version and flags, width, height
    sizes = [struct.unpack(">II", part) for part in boxes if len(part) == 8]
    return max(sizes, key=lambda size: size[0] * size[1], default=None)


def _lacks(marker: bytes) -> Callable[[BinaryIO, int], bool]:
    return lambda file, size: marker not in peek(file, max(0, size - TAIL), TAIL)


def _gif(file: BinaryIO, size: int) -> bool:
    return peek(file, max(0, size - 1), 1) != b";"


def _riff(file: BinaryIO, size: int) -> bool:
    return size < 8 + _number("<I", peek(file, 4, 4))


def _bmp(file: BinaryIO, size: int) -> bool:
    return size < _number("<I", peek(file, 2, 4))


def _boxes(file: BinaryIO, size: int) -> bool:
    """AVIF, HEIC and JPEG 2000 are boxes that begin with their length."""
    at = 0
    while at < size:
        box = peek(file, at, 16)
        if len(box) < 8:
            return True
        length = _number(">I", box[:4])
        # 1: the length follows as 64 bits. 0: the box reaches to the end of the file.
        if length == 1 and len(box) == 16:
            length = _number(">Q", box[8:])
        if length < 8:
            return False
        at += length
    return at > size


def _tiff(file: BinaryIO, size: int) -> bool:
    """Whether the first directory, or a value of one of its fields, lies beyond the end."""
    order = "<" if peek(file, 0, 1) == b"I" else ">"
    at = _number(order + "I", peek(file, 4, 4))
    count = peek(file, at, 2)
    if len(count) < 2:
        return True
    nbytes = 12 * _number(order + "H", count)
    entries = peek(file, at + 2, nbytes)
    if len(entries) < nbytes:
        return True
    fields = struct.iter_unpack(order + "HHII", entries)
    spans = ((number * TIFF_BYTES.get(kind, 1), value) for _, kind, number, value in fields)
    return any(length > 4 and value + length > size for length, value in spans)  # up to 4 bytes lie in the field itself


def _number(form: str, data: bytes) -> int:
    return int(struct.unpack(form, data.ljust(struct.calcsize(form), b"\0"))[0])


CONTAINERS: tuple[tuple[int, bytes, Callable[[BinaryIO, int], bool]], ...] = (
    (0, b"RIFF", _riff),  # WebP
    (0, b"\x89PNG", _lacks(b"IEND")),
    (0, b"\xff\xd8\xff", _lacks(b"\xff\xd9")),  # JPEG
    (0, b"\xff\x4f\xff\x51", _lacks(b"\xff\xd9")),  # a bare JPEG 2000 stream
    (0, b"GIF8", _gif),
    (0, b"BM", _bmp),
    (0, b"II*\0", _tiff),
    (0, b"MM\0*", _tiff),
    (4, b"ftyp", _boxes),  # AVIF, HEIC
    (4, b"jP  ", _boxes),  # JPEG 2000
)
