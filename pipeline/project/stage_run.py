"""Opens a run of a stage from plain data, a work unit. The one place where a `Run` is built, whoever runs the stage."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import NotBuilt
from stages.bundled import shell_path
from stages.pipelines import load
from stages.run import Output, Report, Run, TensorReader
from stages.stage import Input, Stage, WorkUnit

if TYPE_CHECKING:
    from pipeline.store.table import TableFolder
    from schemas.table import Among, TableSchema

T = TypeVar("T")
Write = Callable[[str, Callable[[Path], None]], Path]


def open_run(unit: WorkUnit, report: Report | None = None, write: Write | None = None, kept: Kept | None = None) -> Run[Any]:
    """`write`: how an artifact is written, for a run whose rows are committed. `kept`: what earlier units have read."""
    stage: Stage = load(f"{unit.stage}:STAGE")
    output = Output(unit.artifacts, unit.stored, unit.pending, provenance=unit.provenance)
    if write:
        output.write = write
    inputs = UnitInputs(unit, stage, kept or Kept())
    run: Run[Any] = Run(unit.config, inputs, output, unit.needs, report or Report(), unit.root)
    if kept:
        run.reuse, run.known = kept.model, kept.known.setdefault(unit.stage, {})
    return run


class Kept:
    """What a process keeps between units of one config: input tables, their rows, results of `Run.once`, and one model."""

    def __init__(self) -> None:
        self.tables: dict[Path, TableFolder] = {}
        self.rows: dict[tuple[Path, int | None, tuple[str, ...]], pa.Table] = {}
        self.known: dict[str, dict[Any, Any]] = {}  # by the stage's module
        self.name, self.value = "", None

    def table(self, folder: Path, schema: TableSchema) -> TableFolder:
        from pipeline.store.table import TableFolder

        if folder not in self.tables:
            self.tables[folder] = TableFolder(folder, schema)
        return self.tables[folder]

    def read(self, table: TableFolder, version: int | None, columns: Sequence[str], among: Among | None) -> pa.Table:
        if among:
            return table.rows(version, columns, among)
        # Where files tell which rows there are, all columns are read anyway.
        columns, wanted = table.read_for(columns), [*columns]
        key = table.folder, version, tuple(columns)
        if key not in self.rows:
            self.rows[key] = table.rows(version, columns)
        return self.rows[key].select(wanted) if wanted else self.rows[key]

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Release the model: the next stage of the process needs its memory."""
        self.name, self.value = "", None

    def model(self, name: str, load: Callable[[], Any]) -> Any:
        if self.name != name:
            # The old model goes first: only one is in memory at a time.
            self.name, self.value = "", None
            gc.collect()
            self.value, self.name = load(), name
        return self.value


class UnitInputs:
    """`stages.run.Inputs` over the tables that a work unit names, on disk or in memory."""

    def __init__(self, unit: WorkUnit, stage: Stage, kept: Kept) -> None:
        self.unit, self.stage, self.kept = unit, stage, kept

    def rows(self, schema: TableSchema, columns: Sequence[str] = (), among: Among | None = None) -> pa.Table:
        found = self._input(schema)
        if found.rows is None:
            return self.kept.read(self.kept.table(found.folder, schema), found.version, columns, among)
        rows = found.rows.drop_columns([each.name for each in schema.tensors if each.name in found.rows.column_names])
        rows = rows.filter(pc.is_in(rows[among[0]], among[1])) if among else rows
        return rows.select(list(columns)) if columns else rows

    def tensors(self, schema: TableSchema) -> TensorReader:
        found = self._input(schema)
        if found.rows is not None:
            return ArrayReader(found.rows, schema)
        from pipeline.store.shards import ShardReader

        return ShardReader(found.folder, self.rows(schema), schema)

    def files(self, schema: TableSchema) -> Path:
        if schema in self.stage.optional and schema.name not in self.unit.inputs:
            return self.unit.root / "tables" / schema.name / "none" / "artifacts"
        return self.unit.inputs[schema.name].folder / "artifacts"

    def intact(self, schema: TableSchema, name: str) -> bool:
        from pipeline.store.checksums import Checksums

        own = schema.name == self.stage.name
        folder = self.unit.artifacts.parent if own else self.unit.inputs[schema.name].folder
        checksums, artifact = Checksums(folder), f"artifacts/{name}"
        return not any(checksums.damage(each) for each in checksums.below(artifact) or [artifact])

    def _input(self, schema: TableSchema) -> Input:
        assert schema in (*self.stage.reads, *self.stage.optional), f"{self.stage.name} does not say that it reads {schema.name}"
        found = self.unit.inputs.get(schema.name)
        if found is None or not found.current:
            raise not_built(schema.name, self.stage.name, self.unit.root)
        return found


def not_built(table: str, reader: str, project: Path) -> NotBuilt:
    return NotBuilt(
        f"{reader} needs the table {table}, which is not built for this configuration; "
        f"run: make {table} PROJECT={shell_path(project)}",
        table,
    )


class ArrayReader:
    """The tensors of a table in memory, as its stage yielded it."""

    def __init__(self, rows: pa.Table, schema: TableSchema) -> None:
        self._shapes = {each.name: rows[each.shape].to_pylist() for each in schema.tensors}
        self._values = {each.name: rows[each.name].combine_chunks() for each in schema.tensors}
        self._place = {key: place for place, key in enumerate(rows[schema.key[0]].to_pylist())}
        self._first = schema.tensors[0].name

    def read(self, key: str, name: str = "") -> np.ndarray:
        column, place = name or self._first, self._place[key]
        flat: np.ndarray = self._values[column][place].values.to_numpy(zero_copy_only=False)
        return flat.reshape(self._shapes[column][place])

    def ahead(self, keys: Iterable[str]) -> None:
        """They are in memory already."""


class Lazy(Mapping[str, T]):
    """A mapping whose values are found at their first use: whoever asks meets the error of what is missing."""

    def __init__(self, names: Iterable[str], find: Callable[[str], T]) -> None:
        self._names, self._find, self._found = tuple(names), find, dict[str, T]()

    def __getitem__(self, name: str) -> T:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
