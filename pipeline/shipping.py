"""Input files of work units as bytes: packed where they lie, and unpacked below a folder of a worker on another machine.

A worker's folder repeats the full paths: /data/cats/a.png becomes <folder>/data/cats/a.png, so that relative paths still hold.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.store.disk import from_home
from stages.pipelines import Folder, Resource, Weights
from stages.stage import Stage, StageContext, WorkUnit

CHUNK_BYTES = 64 << 20  # of a file: the most that is in memory at once while it is packed
Put = Callable[[bytes], Any]  # stores bytes, and returns a reference that travels
Get = Callable[[Any], bytes]  # returns the bytes of a reference


@dataclass(frozen=True)
class ShippedFile:
    """A file on its way to a worker. `path` is its full path where it was packed. `size` is in bytes. `mtime_ns` is the time of
    its last change. `chunks` are references to its bytes, in order.
    """

    path: Path
    size: int
    mtime_ns: int
    chunks: tuple[Any, ...]


class Packer:
    """An object that reads files and stores their bytes, so that they can be sent to another machine. `put(bytes)`
    stores bytes and returns a reference to them. The method `pack` remembers the files of its previous call. A
    remembered file that has not changed is not read again.
    """

    def __init__(self, put: Put) -> None:
        self.put = put
        self.packed: dict[Path, ShippedFile] = {}

    def pack(self, paths: Iterable[Path]) -> list[ShippedFile]:
        """Read the files at `paths`, store their bytes, and return one `ShippedFile` for each. Missing files are left
        out. Raises ValueError if a file cannot be read.
        """
        found: dict[Path, ShippedFile] = {}
        for path in dict.fromkeys(map(full, paths)):
            with contextlib.suppress(FileNotFoundError):
                about = path.stat()
                known = self.packed.get(path)
                if known and (known.size, known.mtime_ns) == (about.st_size, about.st_mtime_ns):
                    found[path] = known
                else:
                    found[path] = ShippedFile(path, about.st_size, about.st_mtime_ns, tuple(map(self.put, chunks(path))))
        self.packed = found
        return list(found.values())


def chunks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of the file at `path` in pieces of at most 64 MiB. Raises FileNotFoundError if the file is
    missing. Raises ValueError, with the path in its message, if the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            yield from iter(functools.partial(file.read, CHUNK_BYTES), b"")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read for the workers: {error.strerror or error}") from None


def full(path: Path) -> Path:
    """Return `path` as an absolute path. Symbolic links in it are not resolved."""
    return Path(os.path.abspath(path))  # noqa: PTH100  resolve() follows links


def files_below(path: Path) -> Iterator[Path]:
    """Yield the path of every file in the folder `path`, or `path` itself if it is a file. Links are followed."""
    if path.is_file():
        yield path
    for folder, _, names in os.walk(path, followlinks=True):
        yield from (Path(folder, name) for name in sorted(names))


def lasting_files(stage: Stage, resources: Mapping[str, Resource], inputs: Iterable[Path], ctx: StageContext) -> Iterator[Path]:
    """Yield the paths of the files that every work unit of the stage `stage` needs. A work unit is a number of rows
    that one worker computes. `resources` maps the name of each resource, such as a folder or weights, to its
    declaration. `inputs` are the folders of the input tables. `ctx` is the stage's context, and `ctx.need(name)`
    returns the path of a resource. All files in `inputs` and all weights that the stage needs are yielded.

    A stage may also need other folders, such as the folder of the images. `stage.opens` is a function that tells which
    of their files a work unit opens, so that only these files are sent with the unit. If `stage.opens` is None, this is
    not known, and all files in these folders are yielded here.
    """
    for folder in inputs:
        yield from files_below(folder)
    for need in stage.needs:
        kind = resources[need]
        if isinstance(kind, Weights) or (isinstance(kind, Folder) and stage.opens is None):
            yield from files_below(ctx.need(need))


class Mirror:
    """A folder with copies of another machine's files, for a worker on this machine. `folder` is that folder. It
    repeats full paths: the copy of /data/a.png is <folder>/data/a.png.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.present: dict[Path, tuple[int, int]] = {}  # path where it was packed -> size, time of its last change

    def place(self, path: Path) -> Path:
        """Return the path of a copy on this machine. `path` is the path of the file or folder on the other machine."""
        found = full(path)
        return self.folder / found.relative_to(found.anchor)

    def unpack(self, files: Iterable[ShippedFile], get: Get) -> None:
        """Write a copy of every file in `files` into this object's folder, `self.folder`. `files` describes the files
        on the other machine. The bytes of a file were sent in one or more pieces. `ShippedFile.chunks` lists a
        reference to each piece, in order. `get(reference)` returns the bytes of one piece. A copy that this object
        wrote earlier is kept if the file's size and the time of its last change have not changed since.

        If the folder is missing, it is created. Only the user of this process can enter the new folder.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file in files:
            stamp = file.size, file.mtime_ns
            if self.present.get(file.path) == stamp:
                continue
            place = self.place(file.path)
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("wb") as out:
                for chunk in file.chunks:
                    out.write(get(chunk))
            self.present[file.path] = stamp

    def remove_others(self, files: Iterable[ShippedFile]) -> None:
        """Delete the copies in this folder that are not copies of `files`. `files` describes the files on the other
        machine whose copies are kept.
        """
        for path in self.present.keys() - {file.path for file in files}:
            self.place(path).unlink(missing_ok=True)
            del self.present[path]

    def unit(self, unit: WorkUnit) -> WorkUnit:
        """Return a work unit like `unit`, with paths on this machine: each path is replaced by the path of its copy.
        This holds for tables, weights and folders, and for settings that hold absolute paths. Missing folders are made.
        """
        inputs = {name: dataclasses.replace(one, folder=self.place(one.folder)) for name, one in unit.inputs.items()}
        needs = {name: self.place(value) if isinstance(value, Path) else value for name, value in unit.needs.items()}
        artifacts, root = self.place(unit.artifacts), self.place(unit.root)
        for folder in (root, *(value for value in needs.values() if isinstance(value, Path))):
            if not folder.exists():  # no file of it was needed
                folder.mkdir(parents=True)
        config = self.settings(unit.config)
        return dataclasses.replace(unit, inputs=inputs, needs=needs, config=config, artifacts=artifacts, root=root)

    def settings(self, config: Any) -> Any:
        """Return a copy of the config dataclass `config` in which absolute paths are replaced by the paths of the
        copies on this machine. For example, "/data/cats" becomes "<folder>/data/cats". Here, <folder> is the attribute
        `folder`. Only texts in settings that are declared with `path=True` are replaced. Settings of dataclasses within
        `config` are replaced in this way too. Relative paths and all other settings are unchanged.
        """
        changed = {}
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            placed = self._setting(value, field.metadata.get("path", False))
            if placed != value:
                changed[field.name] = placed
        return dataclasses.replace(config, **changed)

    def _setting(self, value: Any, is_path: bool) -> Any:
        if isinstance(value, tuple):
            return tuple(self._setting(each, is_path) for each in value)
        if dataclasses.is_dataclass(value):
            return self.settings(value)
        if is_path and isinstance(value, str) and from_home(value).is_absolute():
            return str(self.place(from_home(value)))
        return value

    def remove(self) -> None:
        """Remove the folder and all copies in it."""
        self.present.clear()
        shutil.rmtree(self.folder, ignore_errors=True)
