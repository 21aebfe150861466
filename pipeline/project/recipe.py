"""Recipes: everything that decides what a stage computes, as plain data, and the hash of it that names the table's folder."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa

from stages.hashing import file_sha256
from stages.stage import Stage

WEIGHT_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt")  # files of a component that decide what it computes


def significant_settings(config: Any) -> dict[str, Any]:
    """The settings of a section that change the value of a row, by name, nested as the section is.

    Settings that only choose rows (`selects`) or change speed (`runtime`) are left out.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.metadata.get("kind") == "setting":
            found[field.name] = significant_settings(value) if dataclasses.is_dataclass(value) else value
    return found


def recipe(stage: Stage, config: Any, weights: dict[str, Any], tensors: dict[str, str], rows: pa.Table | None) -> dict[str, Any]:
    """Build the recipe of a stage as plain JSON data: name, version, significant settings, columns, weights, inputs.

    `weights` maps each component that the stage needs to its hash. `tensors` maps each table whose tensors the stage reads
    to its recipe id: a row's key says what a tensor was computed from, but not how. `rows` is the snapshot of a stage whose
    rows depend on each other, or None.
    """
    made: dict[str, Any] = {
        "stage": stage.name,
        "version": stage.version,
        "settings": significant_settings(config),
        "columns": {f.name: str(f.type) for f in stage.writes.batch},
    }
    if weights:
        made["weights"] = weights
    if tensors:
        made["tensors"] = tensors
    if rows is not None:
        made["snapshot"] = {"rows": rows.num_rows, "sha256": rows_sha256(rows)}
    plain: dict[str, Any] = json.loads(json.dumps(made, default=str))
    return plain


def recipe_id(made: dict[str, Any]) -> str:
    """The first 12 hex digits of the sha256 of a recipe's canonical JSON. A table's folder has this name."""
    text = json.dumps(made, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def rows_sha256(rows: pa.Table) -> str:
    """sha256 (hex) of the column names and rows of a table, independent of the order of the rows."""
    lines = sorted(json.dumps(row, sort_keys=True, default=str) for row in rows.to_pylist())
    return hashlib.sha256("\n".join([*rows.column_names, *lines]).encode()).hexdigest()


class FileHashes:
    """A cache of the sha256 of weight files in the JSON file `file`, so that a command need not read gigabytes to start.

    A file is hashed again if its size, time of change or inode has changed. The last hash of each component is kept too, so
    that a table is known to be up to date after its weights were deleted to save disk.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.known: dict[str, Any] = {"files": {}, "components": {}}
        with contextlib.suppress(OSError, json.JSONDecodeError):  # a damaged cache only costs time
            self.known |= json.loads(file.read_text())

    def component(self, name: str, path: Path) -> str:
        """The hash of a component, a file or a folder with weight and config files, and remember it as the hash of `name`."""
        files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in WEIGHT_SUFFIXES and p.is_file())
        lines = [f"{p.name if path.is_dir() else 'file'} {self.of_file(p)}" for p in files]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        self._remember("components", name, digest)
        return digest

    def last_known(self, name: str) -> str | None:
        """The hash that `component` last returned for this name, also if its files are gone; None if it was never called."""
        found: str | None = self.known["components"].get(name)
        return found

    def of_file(self, path: Path) -> str:
        """The sha256 (hex) of a file's bytes, from the cache if the file is unchanged."""
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
            temporary.write_text(json.dumps(self.known, indent=1))
            temporary.replace(self.file)
