"""Recipes: what a stage's function is, in clear text, and the short name of it that names the table's folder."""

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

WEIGHT_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt")  # what a component's behaviour depends on


def significant(config: Any) -> dict[str, Any]:
    """The settings of a section that change what a row's value is; knobs for rows' number and for speed are left out."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.metadata.get("kind") != "setting":
            continue
        found[field.name] = significant(value) if dataclasses.is_dataclass(value) else value
    return found


def recipe(stage: Stage, config: Any, weights: dict[str, Any], tensors: dict[str, str], rows: pa.Table | None) -> dict[str, Any]:
    """A stage's recipe: name, version, significant settings, columns, weight hashes, the recipes of the tensor tables it reads.

    A row's key says what a function was applied to, never which function made it; so tensors that are read enter by
    their table's recipe. `rows`: the snapshot of a stage that is not row-wise.
    """
    made: dict[str, Any] = {
        "stage": stage.name,
        "version": stage.version,
        "settings": significant(config),
        "columns": {f.name: str(f.type) for f in stage.writes.batch},
    }
    if weights:
        made["weights"] = weights
    if tensors:
        made["tensors"] = tensors
    if rows is not None:
        made["snapshot"] = {"rows": rows.num_rows, "sha256": digest_of_rows(rows)}
    plain: dict[str, Any] = json.loads(json.dumps(made, default=str))
    return plain


def short(made: dict[str, Any]) -> str:
    """The folder name of a recipe: 12 hex digits of the sha256 of its canonical JSON."""
    text = json.dumps(made, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def digest_of_rows(rows: pa.Table) -> str:
    """sha256 over a table's rows, whatever their order and chunks."""
    lines = sorted(json.dumps(row, sort_keys=True, default=str) for row in rows.to_pylist())
    return hashlib.sha256("\n".join([*rows.column_names, *lines]).encode()).hexdigest()


class FileHashes:
    """sha256 of weight files, remembered by size, time of change and inode, so that a start does not read gigabytes.

    Kept as JSON beside the tables. Also remembers what a component's hash was the last time its files were there:
    weights that are gone (the text encoder, deleted to save disk) need not be fetched again to see that all is up to date.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.known: dict[str, Any] = {"files": {}, "components": {}}
        with contextlib.suppress(OSError, json.JSONDecodeError):  # lost, so the files are read again
            self.known |= json.loads(file.read_text())

    def component(self, name: str, path: Path) -> str:
        """One hash for a component: a file, or a folder's weight and config files."""
        files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in WEIGHT_SUFFIXES and p.is_file())
        parts = [f"{p.name if path.is_dir() else 'file'} {self.of(p)}" for p in files]
        made = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        self._remember("components", name, made)
        return made

    def last(self, name: str) -> str | None:
        """What `component` said the last time, if ever."""
        found: str | None = self.known["components"].get(name)
        return found

    def of(self, path: Path) -> str:
        """sha256 of one file."""
        stat = path.stat()
        stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        entry = self.known["files"].get(str(path.resolve()))
        if entry and entry[:3] == stamp:
            return str(entry[3])
        made = file_sha256(path)
        self._remember("files", str(path.resolve()), [*stamp, made])
        return made

    def _remember(self, kind: str, name: str, value: Any) -> None:
        if self.known[kind].get(name) == value:
            return
        self.known[kind][name] = value
        temporary = self.file.with_name(f".tmp-{os.getpid()}-{self.file.name}")
        with contextlib.suppress(OSError):  # a folder that may only be read: the files are hashed again the next time
            self.file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(self.known, indent=1))
            temporary.replace(self.file)
