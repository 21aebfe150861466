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

from pipeline.project.paths import from_home
from stages.pipelines import Folder, Resource, Weights
from stages.run import Run
from stages.stage import Stage, WorkUnit

CHUNK_BYTES = 64 << 20  # of a file: the most that is in memory at once while it is packed
Put = Callable[[bytes], Any]  # stores bytes, and returns a reference that travels
Get = Callable[[Any], bytes]  # returns the bytes of a reference


@dataclass(frozen=True)
class ShippedFile:
    path: Path  # absolute, where it was packed
    size: int  # bytes
    mtime_ns: int
    chunks: tuple[Any, ...]  # references to its bytes, in order


class Packer:
    """Reads files and stores their bytes by `put`. A file of the previous call that has not changed is not read again."""

    def __init__(self, put: Put) -> None:
        self.put = put
        self.packed: dict[Path, ShippedFile] = {}

    def pack(self, paths: Iterable[Path]) -> list[ShippedFile]:
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
    """Raises FileNotFoundError if the file is missing, ValueError with its path if it cannot be read."""
    try:
        with path.open("rb") as file:
            yield from iter(functools.partial(file.read, CHUNK_BYTES), b"")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read for the workers: {error.strerror or error}") from None


def full(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100  resolve() follows links


def files_below(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for folder, _, names in os.walk(path, followlinks=True):
        yield from (Path(folder, name) for name in sorted(names))


def lasting_files(stage: Stage, resources: Mapping[str, Resource], inputs: Iterable[Path], run: Run[Any]) -> Iterator[Path]:
    """Files that every unit needs: input tables, weights, and folders of which `stage.opens` does not say what a unit opens."""
    for folder in inputs:
        yield from files_below(folder)
    for need in stage.needs:
        kind = resources[need]
        if isinstance(kind, Weights) or (isinstance(kind, Folder) and stage.opens is None):
            yield from files_below(run.needs[need])


class Mirror:
    """Copies of another machine's files below `folder`, which repeats their full paths."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.present: dict[Path, tuple[int, int]] = {}  # path where it was packed -> size, time of its last change

    def place(self, path: Path) -> Path:
        found = full(path)
        return self.folder / found.relative_to(found.anchor)

    def unpack(self, files: Iterable[ShippedFile], get: Get) -> None:
        """Write copies of `files`; those that have not changed are kept. `get` returns the bytes of a chunk."""
        # No other user of this machine may enter it.
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
        for path in self.present.keys() - {file.path for file in files}:
            self.place(path).unlink(missing_ok=True)
            del self.present[path]

    def unit(self, unit: WorkUnit) -> WorkUnit:
        """The unit with the paths of the copies, also in settings. Missing folders are made."""
        inputs = {name: dataclasses.replace(one, folder=self.place(one.folder)) for name, one in unit.inputs.items()}
        needs = {name: self.place(value) if isinstance(value, Path) else value for name, value in unit.needs.items()}
        artifacts, root = self.place(unit.artifacts), self.place(unit.root)
        for folder in (root, *(value for value in needs.values() if isinstance(value, Path))):
            if not folder.exists():  # no file of it was needed
                folder.mkdir(parents=True)
        config = self.settings(unit.config)
        return dataclasses.replace(unit, inputs=inputs, needs=needs, config=config, artifacts=artifacts, root=root)

    def settings(self, config: Any) -> Any:
        """Absolute paths in settings declared with `path=True` become those of the copies, in nested dataclasses too."""
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
        self.present.clear()
        shutil.rmtree(self.folder, ignore_errors=True)
