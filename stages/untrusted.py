"""Reads files that this program did not write: regular files only, and never more bytes or levels than a bound allows."""

# Every failure is a ValueError of one line that names the file.

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections import Counter
from io import BufferedReader
from pathlib import Path
from typing import Any

JSON_BYTES = 100_000_000  # the largest tokenizer.json in use has 33 MB
TOML_BYTES = 1_000_000
SHOWN = 80  # characters of a wrong line
DOTS = 200  # in a line of TOML, outside texts; tomllib's time grows with the square of a dotted key's parts
SYSTEM = ("/proc", "/sys")  # files there have no size and no end
TEXTS = re.compile(r"""\"[^"\n]*"|'[^'\n]*'""")


def open_regular(path: Path, most: int | None = None) -> BufferedReader:
    """Raises ValueError unless it is a regular file of at most `most` bytes. A named pipe is never waited for."""
    _check(path, path.stat(), most)  # before it is opened: opening a device may have an effect
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115  (Path.open takes no opener; the caller closes)
    # Another file may have taken its place.
    try:
        _check(path, os.fstat(file.fileno()), most)
    except ValueError:
        file.close()
        raise
    return file


def read_bytes(path: Path, most: int) -> bytes:
    try:
        with open_regular(path, most) as file:
            return file.read(os.fstat(file.fileno()).st_size)  # a file of /proc says 0 and has no end
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def read_utf8(path: Path, most: int) -> str:
    try:
        return read_bytes(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}") from None


def read_json(path: Path, most: int = JSON_BYTES) -> Any:
    return parse_json(read_bytes(path, most), str(path))


def parse_json(text: str | bytes, where: str) -> Any:
    """`where` names the text in errors, such as "a.jsonl, line 3". A key that is twice in an object is an error."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON at {_place(error)}: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"{where}: not valid JSON: it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError(f"{where}: not valid JSON: not UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from None


def parse_toml(text: str, where: str) -> dict[str, Any]:
    if len(text) > TOML_BYTES:
        raise ValueError(f"{where}: too large: {len(text):,} characters, at most {TOML_BYTES:,} are read")
    long = [line for line in text.splitlines() if line.count(".") > DOTS]
    if any(TEXTS.sub("", line).count(".") > DOTS for line in long):
        raise ValueError(f"{where}: not valid TOML: a line has more than {DOTS} dots")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"{where}: not valid TOML: it is nested too deeply") from None
    except ValueError as error:  # also a whole number of thousands of digits
        at = re.search(r"at line (\d+)", str(error))
        lines = text.splitlines()
        line = lines[int(at[1]) - 1].strip()[:SHOWN] if at and int(at[1]) <= len(lines) else ""
        raise ValueError(f"{where}: not valid TOML: {error}{line and f': {line}'}") from None


class Folders:
    """Lists the folders below `root`, each once: loops of links end."""

    def __init__(self, root: Path) -> None:
        self.root, self.seen = root.resolve(), set[tuple[int, int]]()

    def entries(self, folder: Path) -> list[os.DirEntry[str]]:
        """By name. Raises ValueError, with the reason alone, if it cannot be read, is of the system, or above the root."""
        try:
            status = folder.stat()
            real = folder.resolve() if folder.is_symlink() or not self.seen else folder
            if (status.st_dev, status.st_ino) in self.seen:
                return []
            if any(real.is_relative_to(each) for each in SYSTEM):
                raise ValueError(f"leads to {real}, a folder of the system")
            if self.seen and self.root.is_relative_to(real):
                raise ValueError(f"leads to {real}, above the folder that is searched")
            self.seen.add((status.st_dev, status.st_ino))
            return sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise ValueError(f"cannot be read ({error.strerror})") from error


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # opening a named pipe waits for its writer


def _check(path: Path, status: os.stat_result, most: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a regular file")
    if most is not None and status.st_size > most:
        raise ValueError(f"{path} is too large: {status.st_size:,} bytes, at most {most:,} are read")


def _place(error: json.JSONDecodeError) -> str:
    return f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} is there twice")
    return found
