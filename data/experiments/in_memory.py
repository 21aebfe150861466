"""Run stages of a project in memory. No table is written to disk; only artifacts (files that rows name) are.

An experiment repeats a chain many times with other settings, also on machines without Lance. A stage gets the same context
as from the runner, so it computes the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.errors import NotBuilt
from pipeline.project.project import Project
from schemas.table import TableSchema


class ArrayReader:
    """A reader of the tensors of a table in memory. `rows` is the table as its stage yielded it, tensors included."""

    def __init__(self, rows: pa.Table, schema: TableSchema) -> None:
        self._shapes = {each.name: rows[each.shape].to_pylist() for each in schema.tensors}
        self._values = {each.name: rows[each.name].combine_chunks() for each in schema.tensors}
        self._place = {key: place for place, key in enumerate(rows[schema.key[0]].to_pylist())}
        self._first = schema.tensors[0].name

    def read(self, key: str, name: str = "") -> np.ndarray:
        """Return the tensor `name` of the row with the key `key`, in the tensor's shape. If `name` is empty, the first tensor
        column is read. bfloat16 is returned as uint16 words. Raises KeyError if no row has the key.
        """
        column, place = name or self._first, self._place[key]
        flat: np.ndarray = self._values[column][place].values.to_numpy(zero_copy_only=False)
        return flat.reshape(self._shapes[column][place])

    def ahead(self, keys: Iterable[str]) -> None:
        """Do nothing: the tensors are in memory already."""


class MemoryTables:
    """Tables of a project in memory. `run` adds one: it runs a stage on the tables before it. Artifacts (files that rows
    name) are written below `folder`, one folder per stage.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[str, pa.Table] = {}  # stage -> its rows, tensors included
        self.files: dict[str, Path] = {}  # stage -> the folder of its artifacts

    def branch(self, folder: Path) -> MemoryTables:
        """Return a copy of this object with the tables that it holds now. Stages that the copy runs write their artifacts
        below `folder`.
        """
        copy = MemoryTables(folder)
        copy.rows, copy.files = dict(self.rows), dict(self.files)
        return copy

    def run(self, project: Project, name: str, **replaced: Any) -> pa.Table:
        """Run the stage `name` with the settings of `project` on the tables in memory. Keep its rows and return them,
        tensors included. A table of an earlier run of the stage is replaced. Keyword arguments (`**replaced`) replace fields
        of the stage's context, such as `say`.
        """
        stage = project.stage(name)
        artifacts = self.folder / name
        artifacts.mkdir(parents=True, exist_ok=True)
        context: dict[str, Any] = {
            "artifacts": artifacts,
            "rows": self._read,
            "tensors": lambda schema: ArrayReader(self.rows[schema.name], schema),
            "files": lambda schema: self.files.get(schema.name, self.folder / schema.name),
            "intact": lambda schema, path: True,
            "write_artifact": lambda path, write: _write(artifacts / path, write),
            "provenance": {"recipe": "in memory"},
            **replaced,
        }
        pending = stage.wants(project.context(stage, **context))
        found = pa.Table.from_batches(stage.run(project.context(stage, **context, pending=pending)), stage.writes.batch)
        if stage.finish:
            after = project.context(stage, **context, pending=pending, stored=found)
            found = pa.concat_tables([found, pa.Table.from_batches(stage.finish(after), stage.writes.batch)])
            places = {key: n for n, key in enumerate(zip(*(found[name].to_pylist() for name in stage.writes.key), strict=True))}
            found = found.take(sorted(places.values()))  # a row whose key exists replaces it
        self.rows[name], self.files[name] = found, artifacts
        return found

    def _read(self, schema: TableSchema) -> pa.Table:
        """Return the rows of a table. Raises NotBuilt, as the runner does, if no stage has written it."""
        if schema.name not in self.rows:
            raise NotBuilt(f"the table {schema.name} is not built", schema.name)
        return self.rows[schema.name]


def _write(path: Path, write: Callable[[Path], None]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path)
    return path
