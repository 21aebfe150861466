"""Replay a record of steps on the disk up to a power cut, after which only some of the unsynced steps are on the disk.

A file keeps what was written before its last fsync. A folder keeps the names that it had at its last fsync. A rename is
done or not done, never half. Of everything later, a cut of each kind in CUTS keeps another part.
"""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

CUTS = ("synced", "holes", "any", "names", "journal", "all")
PAGE = 4096
HEAD = struct.Struct("<IIIIQq")


class Step(NamedTuple):
    """`kind` is its letter in disk.c."""

    kind: str
    inode: int
    offset: int
    path: str
    other: str
    data: bytes


@dataclass
class Node:
    """A file, a folder with `names` or a link with a `target`, as the process sees it."""

    names: dict[str, Node] | None = None
    target: str = ""
    data: bytes = b""  # at the beginning of the record
    times: tuple[int, int] | None = None


@dataclass
class Change:
    """A change of one file's data, or of names in folders. `names` lists (folder, name, the new node or None)."""

    time: int
    file: Node | None = None
    offset: int = -1  # -1: the file is cut to `size`
    size: int = 0
    data: bytes = b""
    names: list[tuple[Node, str, Node | None]] = field(default_factory=list)
    durable: bool = False


def read(record: Path) -> list[Step]:
    content, place, found = record.read_bytes(), 0, []
    while place < len(content):
        kind, path, other, size, inode, offset = HEAD.unpack_from(content, place)
        parts, place = [], place + HEAD.size
        for length in (path, other, size):
            parts.append(content[place : place + length])
            place += length
        found.append(Step(chr(kind), inode, offset, parts[0].decode(), parts[1].decode(), parts[2]))
    return found


class Disk:
    """What is on the disk below a folder while a record is replayed. `root` is that folder before the first step."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.inodes: dict[int, Node] = {}
        self.top = self._load(self.root)
        self.changes: list[Change] = []
        self.marked: dict[str, Any] = {}
        self.time = 0
        self._now = _copy_names(self.top)

    def _load(self, path: Path) -> Node:
        stat = path.lstat()
        node = Node(times=(stat.st_atime_ns, stat.st_mtime_ns))
        if path.is_symlink():
            node.target = str(path.readlink())
        elif path.is_dir():
            node.names = {each.name: self._load(each) for each in path.iterdir()}
        else:
            node.data = path.read_bytes()
        self.inodes[stat.st_ino] = node
        return node

    def apply(self, step: Step) -> None:
        self.time += 1
        if step.kind == "N":
            self.marked = json.loads(step.path)
        elif step.kind == "F":
            self._sync(step)
        elif step.kind == "W":
            self._data(step.inode, Change(self.time, offset=step.offset, data=step.data))
        elif step.kind == "T":
            self._data(step.inode, Change(self.time, size=step.offset))
        elif step.kind in "CM":
            self.inodes[step.inode] = Node({} if step.kind == "M" else None)
            self._name((step.path, self.inodes[step.inode]))
        elif step.kind == "S":
            self._name((step.path, Node(target=step.other)))
        elif step.kind == "U":
            self._name((step.path, None))
        elif step.kind == "L":
            self._name((step.other, self._find(step.path)))
        else:
            self._name((step.path, None), (step.other, self._find(step.path)))

    def _data(self, inode: int, change: Change) -> None:
        change.file = self.inodes[inode]
        self.changes.append(change)

    def _name(self, *names: tuple[str, Node | None]) -> None:
        change = Change(self.time)
        for path, node in names:
            folder, name = self._find(str(Path(path).parent)), Path(path).name
            change.names.append((folder, name, node))
            _set(self._now[id(folder)], name, node)
            if node is not None and node.names is not None:
                self._now.setdefault(id(node), {})
        self.changes.append(change)

    def _find(self, path: str) -> Node:
        node = self.top
        for name in Path(path).relative_to(self.root).parts:
            node = self._now[id(node)][name]
        return node

    def _sync(self, step: Step) -> None:
        node = self.inodes.get(step.inode)
        if node and node.names is None:
            place, name = self._find(str(Path(step.path).parent)), Path(step.path).name
            if self._now[id(place)].get(name) is not node:  # Lance renames by the system call itself
                self._renamed(node, place, name)
        for change in self.changes:
            if change.file is node or any(folder is node for folder, _, _ in change.names):
                change.durable = True

    def _renamed(self, node: Node, place: Node, name: str) -> None:
        old = [(folder, each) for folder in self._folders(self.top) for each, it in self._now[id(folder)].items() if it is node]
        change = Change(self.time, names=[(*each, None) for each in old] + [(place, name, node)])
        for folder, each, it in change.names:
            _set(self._now[id(folder)], each, it)
        self.changes.append(change)

    def _folders(self, top: Node) -> Iterator[Node]:
        yield top
        for each in self._now[id(top)].values():
            if each.names is not None:
                yield from self._folders(each)

    def cut(self, kind: str, generator: random.Random, folder: Path) -> None:
        """Write what the disk holds after a power cut into a new folder."""
        names, data = _copy_names(self.top), {}
        until = {"synced": 0, "journal": generator.randint(self._last_synced(), self.time)}.get(kind, self.time)
        own: dict[int, int] = {}
        for change in self.changes:
            if change.file is not None:
                whole = change.durable or kind == "all"
                if whole or kind not in ("synced", "names"):
                    held = data.setdefault(id(change.file), bytearray(change.file.data))
                    _write(held, change if whole else _torn(change, generator, kind))
                continue
            if kind == "any":
                until = max(own.setdefault(id(each), generator.randint(0, self.time)) for each, _, _ in change.names)
            if change.durable or change.time <= until:
                for place, name, node in change.names:
                    _set(names.setdefault(id(place), {}), name, node)
        _save(self.top, folder, names, data)

    def _last_synced(self) -> int:
        return max((change.time for change in self.changes if change.durable), default=0)


def _torn(change: Change, generator: random.Random, kind: str) -> Change:
    """A copy of which a random part did not reach the disk: pages are zeros, or the end is missing, except with `holes`."""
    if change.offset < 0:
        return change
    if kind != "holes" and generator.random() < 0.5:
        return Change(change.time, offset=change.offset, data=change.data[: generator.randint(0, len(change.data))])
    data = bytearray(change.data)
    for start in range(0, len(data), PAGE):
        if generator.random() < 0.7:
            data[start : start + PAGE] = bytes(len(data[start : start + PAGE]))
    return Change(change.time, offset=change.offset, data=bytes(data))


def _write(held: bytearray, change: Change) -> None:
    size = change.size if change.offset < 0 else change.offset
    if change.offset < 0:
        del held[size:]
    held.extend(bytes(max(0, size - len(held))))
    if change.offset >= 0:
        held[size : size + len(change.data)] = change.data


def _set(names: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def _folders(node: Node) -> Iterator[Node]:
    if node.names is not None:
        yield node
        for each in node.names.values():
            yield from _folders(each)


def _copy_names(top: Node) -> dict[int, dict[str, Node]]:
    """Id of a folder -> its names at the beginning of the record."""
    return {id(folder): dict(folder.names or {}) for folder in _folders(top)}


def _save(node: Node, path: Path, names: dict[int, dict[str, Node]], data: dict[int, bytearray]) -> None:
    if node.target:
        path.symlink_to(node.target)
    elif node.names is None:
        path.write_bytes(data.get(id(node), node.data))
        if node.times and id(node) not in data:
            os.utime(path, ns=node.times)
    else:
        path.mkdir()
        for name, each in names.get(id(node), {}).items():
            _save(each, path / name, names, data)
