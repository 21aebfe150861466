"""Recipes: all that decides what a stage computes, as plain data. The hash of a recipe names the table's folder."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.store.checksums import sealed, unsealed
from pipeline.store.disk import atomic_write, stamp
from stages.hashing import file_sha256
from stages.stage import Stage

# Files of a component that decide what it computes: tensors in the formats that are read, or only hashed; configs, tokenizers.
TENSOR_SUFFIXES = (".safetensors", ".gguf")
WEIGHT_SUFFIXES = (*TENSOR_SUFFIXES, ".bin")
TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".model")


def recorded(config: Any) -> dict[str, Any]:
    """The settings that decide which rows there are and what they contain, as plain JSON data."""
    plain: dict[str, Any] = json.loads(json.dumps(settings_of(config, ("setting", "selects")), default=str))
    return plain


def settings_of(config: Any, kinds: tuple[str, ...] = ("setting",)) -> dict[str, Any]:
    """The settings of `kinds` ("setting", "selects", "runtime"), without those that have an `unrecorded` value."""
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


def recipe(
    stage: Stage,
    config: Any,
    weights: dict[str, Any],
    tensors: dict[str, str],
    rows: pa.Table | None,
    content: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """weights: results of `Project.weight_recipe`. tensors: table -> recipe id. rows and content: of the stage's functions."""
    made: dict[str, Any] = {
        "stage": stage.name,
        "version": stage.version,
        "settings": settings_of(config),
        "columns": stage.writes.recorded,
    }
    if weights:
        made["weights"] = weights
    # A row's key says what a tensor was computed from, but not how.
    if tensors:
        made["tensors"] = tensors
    if rows is not None:
        made["snapshot"] = {"rows": rows.num_rows, "sha256": rows_sha256(rows)}
    if content:
        made["content"] = content
    plain: dict[str, Any] = json.loads(json.dumps(made, default=str))
    return plain


def recipe_id(recipe_data: dict[str, Any]) -> str:
    """12 hex digits: the name of the table's folder."""
    text = json.dumps(recipe_data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def rows_sha256(rows: pa.Table) -> str:
    """Of the column names and rows, in whatever order."""
    lines = sorted(json.dumps(row, sort_keys=True, default=str) for row in rows.to_pylist())
    return hashlib.sha256("\n".join([*rows.column_names, *lines]).encode()).hexdigest()


class FileHashes:
    """sha256 of weight files in a JSON file, so that a command need not read gigabytes to start."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.known: dict[str, Any] = {"files": {}, "components": {}}  # components: name -> digest
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a damaged cache only costs time
            stamp(file)  # it is a regular file
            self.known |= unsealed(file.read_bytes())

    def component(self, name: str, path: Path, patterns: Iterable[str] = ("*",), weights: bool = True) -> str:
        """One hash of a component's weight and config files, remembered as `name`. `path`: its folder or its only file."""
        files, suffixes = [path], (*TEXT_SUFFIXES, *(WEIGHT_SUFFIXES if weights else ()))
        if not path.is_file():
            found = sorted({p for pattern in patterns for p in path.glob(pattern)})
            # macOS writes "._name" files.
            files = [p for p in found if p.suffix in suffixes and not p.name.startswith("._") and p.is_file()]
        lines = [f"{p.relative_to(path).as_posix() if path.is_dir() else 'file'} {self.of_file(p)}" for p in files]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        self._remember("components", name, digest)
        return digest

    def of_file(self, path: Path) -> str:
        now = [*stamp(path)]
        entry = self.known["files"].get(str(path.resolve()))
        if entry and entry[:3] == now:
            return str(entry[3])
        digest = file_sha256(path)
        self._remember("files", str(path.resolve()), [*now, digest])
        return digest

    def _remember(self, kind: str, name: str, value: Any) -> None:
        if self.known[kind].get(name) == value:
            return
        self.known[kind][name] = value
        # In a read-only folder the files are hashed again next time.
        with contextlib.suppress(OSError), atomic_write(self.file) as temporary:
            temporary.write_text(json.dumps(sealed(self.known), indent=1))
