"""sha256 of files: the id of an image, and the check that a weight file or a checkpoint is the one that was written."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO


def file_sha256(file: Path | BinaryIO) -> str:
    """Return the sha256 of a file's bytes as 64 hex digits. `file` is a path or an open binary file. An open file is read
    from its start, whatever its position. Raises OSError if the file cannot be read.
    """
    if isinstance(file, Path):
        with file.open("rb") as opened:
            return file_sha256(opened)
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
