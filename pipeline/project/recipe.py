"""Recipes: all that decides what a stage computes, as plain data. The hash of a recipe names the table's folder."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.store.checksums import text_checksum
from stages.hashing import file_sha256
from stages.stage import Stage

WEIGHTS = (".safetensors", ".bin", ".gguf")
WEIGHT_SUFFIXES = (*WEIGHTS, ".json", ".jinja", ".txt", ".model")  # files of a component that decide what it computes


def significant_settings(config: Any) -> dict[str, Any]:
    """Return the settings of `config` that change the content of a row, as a dict from name to value. `config` is a
    config dataclass. A nested section becomes a nested dict.

    A field declared with `unrecorded=(...)` is left out if its value is one of these values.
    """
    return settings_of(config, ("setting",))


def settings_of(config: Any, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Return the settings of `config` that are of one of the `kinds`, as a dict from name to value. `config` is a
    config dataclass. A nested section becomes a nested dict. There are three kinds. A "setting" changes the content of
    rows. A "selects" setting decides which rows a table has. A "runtime" setting changes no row.

    A field declared with `unrecorded=(...)` is left out if its value is one of these values.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.metadata.get("kind") in kinds and value not in field.metadata.get("unrecorded", ()):
            found[field.name] = _plain(value, kinds)
    return found


def _plain(value: Any, kinds: tuple[str, ...]) -> Any:
    if isinstance(value, tuple) and any(dataclasses.is_dataclass(item) for item in value):
        return [settings_of(item, kinds) for item in value]
    return settings_of(value, kinds) if dataclasses.is_dataclass(value) else value


def recipe(stage: Stage, config: Any, weights: dict[str, Any], tensors: dict[str, str], rows: pa.Table | None) -> dict[str, Any]:
    """Return the recipe of `stage` as plain JSON data. A recipe records what decides the stage's result. `config` is
    the stage's config dataclass. `weights` maps the name of each model component, such as "transformer", to the result
    of `Project.weight_recipe`. `tensors` maps table names to folder names of 12 hex digits, for the tables from which
    the stage reads tensors. `rows` is the result of the function `stage.snapshot`: the rows on which the whole result
    depends. `rows` is None if the stage has no function `snapshot`.

    The folder name of a table is the id of the table's recipe (see `recipe_id`). The id is needed because a row's key
    says what a tensor was computed from, but not how.
    """
    made: dict[str, Any] = {
        "stage": stage.name,
        "version": stage.version,
        "settings": significant_settings(config),
        "columns": stage.writes.recorded,
    }
    if weights:
        made["weights"] = weights
    if tensors:
        made["tensors"] = tensors
    if rows is not None:
        made["snapshot"] = {"rows": rows.num_rows, "sha256": rows_sha256(rows)}
    plain: dict[str, Any] = json.loads(json.dumps(made, default=str))
    return plain


def recipe_id(recipe_data: dict[str, Any]) -> str:
    """Return the name of a table's folder: 12 hex digits. They are the first digits of the sha256 of `recipe_data` as
    canonical JSON. `recipe_data` is a recipe (see `recipe`): everything that decides what the table's stage computes.
    """
    text = json.dumps(recipe_data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def rows_sha256(rows: pa.Table) -> str:
    """Return the sha256 (hex) of the column names and rows of a table. The order of the rows does not matter."""
    lines = sorted(json.dumps(row, sort_keys=True, default=str) for row in rows.to_pylist())
    return hashlib.sha256("\n".join([*rows.column_names, *lines]).encode()).hexdigest()


def _decides(path: Path) -> bool:
    """Return True if `path` is a weight file or a config file, judged by its suffix. Folders give False. Files with
    names such as "._name", which macOS writes, give False too.
    """
    return path.suffix in WEIGHT_SUFFIXES and not path.name.startswith("._") and path.is_file()


class FileHashes:
    """A cache of the sha256 hashes of weight files, stored in the JSON file `file`. A weight file is hashed again if its size,
    modification time or inode has changed. The last hash of each component is remembered even if its files are deleted.

    So a command need not read gigabytes to start. A table whose weights were deleted is still known to be up to date.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.known: dict[str, Any] = {"files": {}, "components": {}}
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a damaged cache only costs time
            stored = json.loads(file.read_text())
            checksum = stored.pop("checksum", None)  # an earlier release wrote none
            if checksum in (None, text_checksum(json.dumps(stored, sort_keys=True))):
                self.known |= stored

    def component(self, name: str, path: Path, patterns: Iterable[str] = ("*",), weights: bool = True) -> str:
        """Return the sha256 of a model component's weight and config files together, as hex digits. `path` is the
        component's only file or its folder. `patterns` are glob patterns that choose files in the folder. If `weights`
        is False, weight files in the folder are left out. The hash is also stored under `name`, and `last_known(name)`
        returns it later.

        A tokenizer is hashed without weight files, since weights of the text encoder may lie in its folder.
        """
        found = [path] if path.is_file() else sorted({p for pattern in patterns for p in path.glob(pattern)})
        files = [path] if path.is_file() else [p for p in found if _decides(p) and (weights or p.suffix not in WEIGHTS)]
        lines = [f"{p.relative_to(path).as_posix() if path.is_dir() else 'file'} {self.of_file(p)}" for p in files]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        self._remember("components", name, digest)
        return digest

    def last_known(self, name: str) -> str | None:
        """Return the stored hash of a model component: a sha256 in hex digits, or None if none is stored. The method
        `component` stores the hash under a name, and `name` is this name. For example, `component("a", path)` stores a
        hash, and `last_known("a")` returns the hash later.

        The hash is that of the component's files when they were last read. The files may be deleted by now.
        """
        found: str | None = self.known["components"].get(name)
        return found

    def of_file(self, path: Path) -> str:
        """Return the sha256 (hex) of the bytes of the file `path`, from the cache if the file is unchanged."""
        stat = path.stat()
        stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        entry = self.known["files"].get(str(path.resolve()))
        if entry and entry[:3] == stamp:
            return str(entry[3])
        digest = file_sha256(path)
        self._remember("files", str(path.resolve()), [*stamp, digest])
        return digest

    def _remember(self, kind: str, name: str, value: Any) -> None:
        if self.known[kind].get(name) == value:
            return
        self.known[kind][name] = value
        temporary = self.file.with_name(f".tmp-{os.getpid()}-{self.file.name}")
        with contextlib.suppress(OSError):  # in a read-only folder the files are hashed again next time
            self.file.parent.mkdir(parents=True, exist_ok=True)
            checksum = {"checksum": text_checksum(json.dumps(self.known, sort_keys=True))}
            temporary.write_text(json.dumps(self.known | checksum, indent=1))
            temporary.replace(self.file)
