"""Checksums notice bytes that changed on the disk. All are xxh3, which is as fast as memory.

    a file of a table           its line in the table's checksums.jsonl: name, size, 128 bits
    a tensor                    a column of its row: 64 bits, signed
    a line of checksums.jsonl   its own end: 64 bits
    a JSON file                 its own entry "checksum": 64 bits

What names content, an image, an adapter or the weights in a recipe, is a sha256 (stages/hashing.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.store.disk import atomic_write, make_folder, open_own, stamp, sync

FILE = "checksums.jsonl"
CHUNK = 8 << 20  # bytes that are read at once
SLACK = 64  # lines of deleted files that are kept before the file is rewritten

Record = tuple[int, str]  # size in bytes, xxh3 of 128 bits in hex
_seen: dict[tuple[str, int, int, int], str] = {}  # path and its `stamp` -> xxh3, in this process


def tensor_checksum(values: Any) -> int:
    """Of the bytes of a contiguous array."""
    import xxhash

    # Signed: filters on unsigned columns fail in Lance through DuckDB (lance#2972).
    found: int = xxhash.xxh3_64_intdigest(values)
    return found - 2**64 if found >= 2**63 else found


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    plain = json.loads(json.dumps(document))
    return {**plain, "checksum": _text_checksum(json.dumps(plain, sort_keys=True))}


def unsealed(content: bytes) -> dict[str, Any]:
    """The document of `sealed`, without the checksum. Raises ValueError, with what is wrong in words."""
    try:
        found = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    checksum = found.pop("checksum", None) if isinstance(found, dict) else None
    if checksum is None or checksum != _text_checksum(json.dumps(found, sort_keys=True)):
        raise ValueError("it differs from its checksum")
    return dict(found)


def _text_checksum(text: str) -> str:
    import xxhash

    return str(xxhash.xxh3_64_hexdigest(text.encode()))


def _file_checksum(path: Path) -> str:
    import xxhash

    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
    return str(found.hexdigest())


class Checksums:
    """The checksum file of a table. A file may have several records, and is intact if it agrees with one of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / FILE
        self._stamp: tuple[int, int, int] | None = None
        self._known: dict[str, set[Record]] = {}
        self._lines = 0

    def known(self) -> Mapping[str, set[Record]]:
        """Name, relative to the folder -> its records. Damaged lines are left out: their files count as unchecked."""
        try:
            now = stamp(self.file)
        except OSError:
            if self.file.exists():
                os.close(open_own(self.file, os.O_RDONLY))  # raises: without it no file would be checked
            self._known, self._lines, self._stamp = {}, 0, None
            return self._known
        if now != self._stamp:
            with os.fdopen(open_own(self.file, os.O_RDONLY), "rb") as file:
                lines = file.read().decode(errors="replace").split("\n")
            self._known, self._lines, self._stamp = _parse(lines), len(lines), now
        return self._known

    def below(self, folder: str) -> list[str]:
        """The recorded files of a folder that is written whole. If it was written twice, without those that are gone."""
        found = {name: records for name, records in self.known().items() if name.startswith(f"{folder}/")}
        again = any(len(records) > 1 for records in found.values())
        return sorted(name for name in found if not again or (self.folder / name).exists())

    def record(self, files: Mapping[str, Path]) -> None:
        """`files`: name -> where its content lies now. The records are on the disk when the call ends."""
        lines = [_line(name, (path.stat().st_size, _file_checksum(path))) for name, path in files.items()]
        if not lines:
            return
        make_folder(self.folder)
        new = not self.file.exists()
        with os.fdopen(open_own(self.file, os.O_RDWR | os.O_CREAT | os.O_APPEND), "ab+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                # A process that was killed while it wrote leaves a line without an end.
                lines[0] = lines[0] if file.read() == b"\n" else f"\n{lines[0]}"
            file.write("".join(f"{line}\n" for line in lines).encode())
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
        if problem := self.resized(name):
            return problem
        path, records = self.folder / name, self.known().get(name)
        if records is None:
            return ""
        key = (str(path), *stamp(path))
        if fresh or key not in _seen:
            _seen[key] = _file_checksum(path)
        return "" if _seen[key] in {checksum for _, checksum in records} else "differs from its checksum"

    def resized(self, name: str) -> str:
        """As `damage`, by the size alone."""
        records = self.known().get(name)
        try:
            size = stamp(self.folder / name)[0]
        except OSError:
            return "is no regular file" if (self.folder / name).exists() else "is missing"
        if records is None or size in {length for length, _ in records}:
            return ""
        return f"has {size} bytes instead of {max(records)[0]}"

    def _rewrite(self, records: Mapping[str, set[Record]]) -> None:
        text = "".join(f"{_line(name, record)}\n" for name, each in sorted(records.items()) for record in sorted(each))
        with atomic_write(self.file) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _line(name: str, record: Record) -> str:
    text = json.dumps({"file": name, "bytes": record[0], "xxh3": record[1]}, ensure_ascii=False)
    return f'{text[:-1]}, "check": "{_text_checksum(text)}"}}'


def _parse(lines: Iterable[str]) -> dict[str, set[Record]]:
    found: dict[str, set[Record]] = {}
    for line in lines:
        try:
            entry = json.loads(line)
            name, record = str(entry["file"]), (int(entry["bytes"]), str(entry["xxh3"]))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
        if _line(name, record) == line:
            found.setdefault(name, set()).add(record)
    return found
