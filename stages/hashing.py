"""sha256 of texts and files: the id of a row, the check of a weight file or a checkpoint."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO

LARGE = 2_000_000_000  # bytes; nothing is said about a smaller file, which takes a second or two
PART = 1 << 22  # bytes that are read at once

_note: ContextVar[Callable[[str], None] | None] = ContextVar("note", default=None)


@contextmanager
def hashing_shown(note: Callable[[str], None]) -> Iterator[None]:
    """Report within the block how far the hashing of a large file is. Each text replaces the one before; "" removes it."""
    token = _note.set(note)
    try:
        yield
    finally:
        _note.reset(token)


def text_sha256(*texts: str) -> str:
    """Hex; a line feed stands between the texts."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def file_sha256(file: Path | BinaryIO) -> str:
    """Hex. An open file is read from its start, whatever its position."""
    if isinstance(file, Path):
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            note = _note.get()
            if not note or size < LARGE:
                return file_sha256(opened)
            digest, part, shown = hashlib.sha256(), memoryview(bytearray(PART)), ""
            while count := opened.readinto(part):
                digest.update(part[:count])
                text = f"hashing {file.name}: {opened.tell() / 1e9:.1f} of {size / 1e9:.1f} GB"
                if text != shown:
                    shown = text
                    note(text)
            note("")
            return digest.hexdigest()
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
