"""The files of a new project before it exists: they arrive in parts in a hidden folder, and Create moves them as a whole."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.commands.init import new_project
from pipeline.project.config import FILE
from pipeline.project.edit import edited
from pipeline.store.disk import atomic_write, format_bytes, open_own, require_room, stamp
from pipeline.store.lock import PATIENCE, locked
from stages.untrusted import parse_json, read_utf8

MOST_FILES = 20_000
MOST_FILE, MOST_ALL = 4 * 10**9, 200 * 10**9  # bytes
NAME_BYTES, DEPTH = 200, 8  # of one part of a path, in UTF-8; parts of a path
JOINERS = "\u200c\u200d"  # the invisible characters that names may have: emoji and some scripts are made with them
RESERVED = {"CON", "PRN", "AUX", "NUL", *(f"{device}{number}" for device in ("COM", "LPT") for number in range(1, 10))}


@dataclass(frozen=True)
class File:
    key: str
    name: str  # below the folder of pictures
    size: int


def safe_name(part: str) -> str:
    """One part of a path, as every system can store it: composed letters, no separator, control character or device."""
    text = unicodedata.normalize("NFC", part)
    text = "".join("_" if _forbidden(character) else character for character in text).strip(" .") or "_"
    if text.partition(".")[0].rstrip().upper() in RESERVED:
        text = f"_{text}"
    if len(text.encode()) > NAME_BYTES:
        # The head alone is cut and hashed: a caption file still has the name of its picture.
        head, dot, ending = text.rpartition(".")
        head, ending = (head, dot + ending) if head and len(ending.encode()) <= 20 else (text, "")
        digest = hashlib.sha256(head.encode()).hexdigest()[:8]
        text = f"{head.encode()[: NAME_BYTES - 30].decode(errors='ignore')}-{digest}{ending}"
    return text


def _forbidden(character: str) -> bool:
    category = unicodedata.category(character)
    return character in '/\\<>:"|?*' or (category in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in JOINERS)


def _is_safe(part: str) -> bool:
    return part.strip(" .") == part != "" and len(part.encode()) < 256 and not any(map(_forbidden, part))


def safe_paths(paths: Sequence[str], taken: set[str]) -> list[str]:
    """A name for each path, none of them in `taken` (casefolded), which gets them too; "" for a hidden file.

    What has the same name up to the first dot, such as a picture and its caption, gets the same suffix. Raises ValueError for a
    path that is too deep.
    """
    groups: dict[str, list[int]] = {}
    names = []
    for number, path in enumerate(paths):
        parts = path.split("/")
        if len(parts) > DEPTH:
            raise ValueError(f"{path[:80]!r}: more than {DEPTH} folders deep; choose an inner folder")
        hidden = any(part.startswith(".") and part.strip(".") for part in parts)
        names.append("" if hidden else "/".join(map(safe_name, parts)))
        if not hidden:
            folder, slash, last = path.rpartition("/")
            groups.setdefault(folder + slash + last.partition(".")[0], []).append(number)
    for members in groups.values():
        count = 1
        while any(_suffixed(names[number], count).casefold() in taken for number in members):
            count += 1
        for number in members:
            own = count
            while (name := _suffixed(names[number], own)).casefold() in taken:  # two of one group: A.jpg and A.JPG
                own += 1
            names[number] = name
            taken.add(name.casefold())
    return names


def _suffixed(name: str, count: int) -> str:
    folder, slash, last = name.rpartition("/")
    head, dot, ending = last.partition(".")
    return name if count == 1 else f"{folder}{slash}{head} {count}{dot}{ending}"


class Draft:
    """Raises ValueError, in one line, for whatever cannot be stored."""

    def __init__(self, folder: Path) -> None:
        self.place = folder  # where the project will lie
        self.folder = folder / ".new-project"
        self.project = self.folder / "project"
        self.images = self.project / "images"
        self.turn = threading.Lock()
        self._read: tuple[Any, dict[str, File]] = (None, {})

    @property
    def seen(self) -> str:
        """Differs once another file is announced, or all are gone."""
        path = self.folder / "files.jsonl"
        return str(stamp(path)) if path.exists() else ""

    def files(self) -> dict[str, File]:
        path = self.folder / "files.jsonl"
        now = self.seen
        if now != self._read[0]:
            try:
                lines = read_utf8(path, 100_000_000).splitlines() if now else []
                found = [File(**parse_json(line, str(path))) for line in lines]
                sound = all(isinstance(f.key, str) and isinstance(f.name, str) and type(f.size) is int for f in found)
                if not sound or not all(_is_safe(part) for f in found for part in (f.key, *f.name.split("/"))):
                    raise ValueError
            except (ValueError, TypeError):
                raise ValueError(f"{path}: not as this program writes it; delete {self.folder} to begin anew") from None
            self._read = now, {file.key: file for file in found}
        return self._read[1]

    def arrived(self, file: File) -> int:
        """Bytes of it that are here."""
        if _size(self.images / file.name) == file.size:
            return file.size
        return _size(self.folder / "parts" / file.key) or 0

    def announce(self, listed: Any) -> dict[str, Any]:
        """`listed`: [path, bytes, time of change] of each file that will come; the same again has the same key.

        Returns "have", [key or "", bytes that are here] of each, and "said".
        """
        rows = [_row(each) for each in listed] if isinstance(listed, list) else []
        if not rows:
            raise ValueError("the files must be a list of [path, bytes, time of change]")
        with self.changing():
            files = dict(self.files())
            keys = [hashlib.sha256("\0".join(map(str, row)).encode(errors="surrogatepass")).hexdigest()[:32] for row in rows]
            new = {key: row for key, row in zip(keys, rows, strict=True) if key not in files}
            here = (path.relative_to(self.images).as_posix() for path in self.images.rglob("*")) if self.images.exists() else ()
            taken = {name.casefold() for name in (*here, *(file.name for file in files.values()))}
            names = safe_paths([path for path, *_ in new.values()], taken)
            added = [File(key, name, size) for (key, (_, size, _)), name in zip(new.items(), names, strict=True) if name]
            files |= {file.key: file for file in added}
            self._check(list(files.values()), sum(file.size for file in added))
            with atomic_write(self.folder / "files.jsonl") as temporary:
                temporary.write_text("".join(json.dumps(asdict(file)) + "\n" for file in files.values()), encoding="utf-8")
            for file in added:
                if not file.size:
                    self._finish(file)
            have = [[key, self.arrived(files[key])] if key in files else ["", 0] for key in keys]
        left_out = sum(not key for key, _ in have)
        return {"have": have, "said": f"{left_out} hidden files are left out" if left_out else ""}

    def _check(self, files: list[File], more: int) -> None:
        if len(files) > MOST_FILES:
            raise ValueError(f"{len(files)} files, more than the {MOST_FILES} that a project is begun with: choose fewer")
        for file in files:
            if file.size > MOST_FILE:
                size, most = format_bytes(file.size), format_bytes(MOST_FILE)
                raise ValueError(f"{file.name}: {size}, more than the {most} that one file may have: leave it out")
        if (total := sum(file.size for file in files)) > MOST_ALL:
            raise ValueError(f"{format_bytes(total)} in all, more than {format_bytes(MOST_ALL)}: choose fewer files")
        require_room("the upload", [(self.folder, more)])
        folders = {str(parent) for file in files for parent in Path(file.name.casefold()).parents}
        if both := next((file.name for file in files if file.name.casefold() in folders), ""):
            raise ValueError(f"{both}: a file has the name of a folder; rename one of them")

    def receive(self, key: str, at: int, content: bytes) -> int:
        """Append the bytes from `at` on, if those before are here. Returns how many are here: the next part begins there."""
        with self.changing():
            file = self.files().get(key)
            if file is None:
                raise ValueError("this file was not announced, or all files were taken out: choose it again")
            here = self.arrived(file)
            if here == at < file.size:
                if not content or at + len(content) > file.size:
                    raise ValueError(f"{file.name}: must be {file.size} bytes, as announced: it changed; choose it again")
                require_room("the upload", [(self.folder, len(content))])
                part = self.folder / "parts" / key
                part.parent.mkdir(exist_ok=True)
                with os.fdopen(open_own(part, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as out:
                    out.write(content)
                here = at + len(content)
                if here == file.size:
                    self._finish(file)
            return here

    def _finish(self, file: File) -> None:
        part, path = self.folder / "parts" / file.key, self.images / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.parent.resolve().is_relative_to(self.images.resolve()):
            raise ValueError(f"{path.parent} is a link: delete it")
        if file.size:
            part.replace(path)
        else:
            path.touch()

    def missing(self) -> list[File]:
        return [file for file in self.files().values() if _size(self.images / file.name) != file.size]

    def discard(self) -> None:
        with self.changing():
            self._clear()

    def _clear(self) -> None:
        for name in ("project", "parts"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / "files.jsonl").unlink(missing_ok=True)

    def create(self, name: str, options: Mapping[str, str], settings: Mapping[str, Any]) -> list[str]:
        """Make the project `name` of the files: `latentmill init` with `options`, then these settings. Returns init's lines."""
        if not name or name != safe_name(name) or name.startswith("."):
            raise ValueError("Name: one word or some, which a folder may have, such as cats")
        folder = self.place / name
        if os.path.lexists(folder):
            raise ValueError(f"{folder} exists already: choose another name")
        with self.changing():
            if not self.files():
                raise ValueError("add pictures first")
            if missing := self.missing():
                raise ValueError(f"{len(missing)} files are not here as a whole, such as {missing[0].name}: choose them again")
            file = self.project / FILE
            file.unlink(missing_ok=True)  # of a try that was killed
            told = new_project(self.project, {**options, "images": str(self.images)})
            if settings:
                file.write_text(edited(file.read_text(encoding="utf-8"), settings), encoding="utf-8")
            os.sync()
            self.project.rename(folder)
            self._clear()
        return [line.replace(str(self.project), str(folder)) for line in told]

    @contextmanager
    def changing(self) -> Iterator[None]:
        self.folder.mkdir(exist_ok=True)
        for path in (self.folder, self.project, self.images, self.folder / "parts"):
            if path.is_symlink():
                raise ValueError(f"{path} is a link: delete it")
        with self.turn, locked(self.folder / "lock", PATIENCE):  # many parts at once wait in this process without looking
            yield


def _size(path: Path) -> int | None:
    try:
        return path.lstat().st_size
    except OSError:
        return None


def _row(each: Any) -> tuple[str, int, int]:
    match each:
        case [str(path), int(size), int() | float() as changed] if path and size >= 0 and len(path) <= 4096:
            return path, size, int(changed)
    raise ValueError("a file must be [path, bytes, time of change]")
