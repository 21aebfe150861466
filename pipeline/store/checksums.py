"""Checksums of a table's files and tensors: xxh3, which is as fast as memory.

checksums.jsonl in a table's folder has one line per file that was written: its name, its size and its 128-bit xxh3. Every line
ends with a checksum of itself, so a damaged line is ignored. A file without a line counts as unchecked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.store.disk import atomic_write, make_folder, sync

FILE = "checksums.jsonl"
CHUNK = 8 << 20  # bytes that are read at once
SLACK = 64  # lines of deleted files that are kept before the file is rewritten

Record = tuple[int, str]  # size in bytes, xxh3 of 128 bits in hex
_seen: dict[tuple[str, int, int, int], str] = {}  # path, size, time of change, inode -> xxh3, in this process


def tensor_checksum(values: Any) -> int:
    """xxh3 of the bytes of a contiguous array, as a signed 64-bit number."""
    import xxhash

    # Signed: filters on unsigned columns fail in Lance through DuckDB (lance#2972).
    return int(np.uint64(xxhash.xxh3_64_intdigest(values)).astype(np.int64))


def file_checksum(path: Path) -> str:
    import xxhash

    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
    return str(found.hexdigest())


def text_checksum(text: str) -> str:
    import xxhash

    return str(xxhash.xxh3_64_hexdigest(text.encode()))


class Checksums:
    """The checksum file of a table. A file may have several records, and is intact if it agrees with one of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / FILE
        self._stamp: tuple[int, int, int] | None = None
        self._known: dict[str, set[Record]] = {}
        self._lines = 0

    def known(self) -> Mapping[str, set[Record]]:
        """Name, relative to the folder -> its records. Damaged lines are left out."""
        try:
            stat = self.file.stat()
        except OSError:
            self._known, self._lines, self._stamp = {}, 0, None
            return self._known
        stamp = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
        if stamp != self._stamp:
            lines = self.file.read_bytes().decode(errors="replace").split("\n")
            self._known, self._lines, self._stamp = _parse(lines), len(lines), stamp
        return self._known

    def record(self, files: Mapping[str, Path]) -> None:
        """`files`: name -> where its content lies now. The records are on the disk when the call ends."""
        lines = [_line(name, (path.stat().st_size, file_checksum(path))) for name, path in files.items()]
        if not lines:
            return
        make_folder(self.folder)
        new = not self.file.exists()
        with self.file.open("a", encoding="utf-8") as file:
            # A process that was killed while it wrote leaves a line without an end.
            file.write("".join(["\n" if self._torn() else "", *(f"{line}\n" for line in lines)]))
            file.flush()
        sync(self.file)
        if new:
            sync(self.folder)

    def forget(self, names: Iterable[str]) -> None:
        gone = set(names)
        if gone & self.known().keys():
            self._rewrite({name: records for name, records in self.known().items() if name not in gone})

    def compact(self) -> None:
        there = {name: records for name, records in self.known().items() if (self.folder / name).exists()}
        if self._lines > 2 * sum(map(len, there.values())) + SLACK:
            self._rewrite(there)

    def damage(self, name: str, *, fresh: bool = False) -> str:
        """What is wrong, in words, or "". Without a record a file only has to exist. `fresh`: trust no earlier reading."""
        records = self.known().get(name)
        if problem := self.resized(name):
            return problem
        path = self.folder / name
        if records is None or _checksum(path, fresh) in {checksum for _, checksum in records}:
            return ""
        return "differs from its checksum"

    def resized(self, name: str) -> str:
        """As `damage`, by the size alone."""
        records = self.known().get(name)
        try:
            size = (self.folder / name).stat().st_size
        except OSError:
            return "is missing"
        if records is None or size in {length for length, _ in records}:
            return ""
        return f"has {size} bytes instead of {max(records)[0]}"

    def _torn(self) -> bool:
        if not self.file.exists() or not self.file.stat().st_size:
            return False
        with self.file.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"

    def _rewrite(self, records: Mapping[str, set[Record]]) -> None:
        text = "".join(f"{_line(name, record)}\n" for name, each in sorted(records.items()) for record in sorted(each))
        with atomic_write(self.file) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _checksum(path: Path, fresh: bool) -> str:
    stat = path.stat()
    key = (str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino)
    if fresh or key not in _seen:
        _seen[key] = file_checksum(path)
    return _seen[key]


def _line(name: str, record: Record) -> str:
    text = json.dumps({"file": name, "bytes": record[0], "xxh3": record[1]}, ensure_ascii=False)
    return f'{text[:-1]}, "check": "{text_checksum(text)}"}}'


def _parse(lines: Iterable[str]) -> dict[str, set[Record]]:
    found: dict[str, set[Record]] = {}
    for line in lines:
        try:
            entry = json.loads(line)
            name, record = entry["file"], (int(entry["bytes"]), str(entry["xxh3"]))
        except (ValueError, KeyError, TypeError):
            continue
        if _line(name, record) == line:
            found.setdefault(name, set()).add(record)
    return found
