"""A project: its folder, settings, resources and the folders of its tables. `pipeline.api` adds the methods for users."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import stages
from pipeline.errors import NotBuilt
from pipeline.project import config as configuration
from pipeline.project import recipe as recipes
from pipeline.project.config import Overrides
from pipeline.project.parse import nearest
from pipeline.store.disk import common_folder, from_home, shell_path
from stages.pipelines import FamilyRecord, Folder, Weights, load
from stages.stage import Input, Stage, StageContext

if TYPE_CHECKING:
    from pipeline.store.reader import ShardReader
    from pipeline.store.table import TableFolder
    from schemas.table import TableSchema
    from stages.models.family import Family


@dataclass(frozen=True)
class FixedTable:
    """A table that a project uses for one stage, whatever its settings, such as that of an earlier training run."""

    stage: str
    table: TableFolder
    recipe: Mapping[str, Any]  # that the table was made by


class Project:
    """A folder with project.toml, input files and tables/. Raises ValueError if it holds no project or a setting is wrong.

    Tables are read at their first use and cached until `refresh` finds that a stage has run, in this or another process.
    Between two runs all methods therefore see the same state of the tables.
    """

    def __init__(self, path: str | Path, overrides: Overrides = (), *, fetch: bool = False) -> None:
        folder = from_home(path)
        if not folder.is_dir():
            what = "is a file, not a project's folder" if folder.exists() else "no such folder"
            raise ValueError(f"{folder}: {what}; `latentmill init --help` explains how to make a project")
        self.path = folder
        self.overrides = overrides
        self.fetch = fetch
        self.config = configuration.load(folder / configuration.FILE, overrides)
        self.pipeline = stages.pipeline(self.config.project.pipeline)
        self.hashes = recipes.FileHashes(folder / "tables" / "weights.json")
        self._recipes: dict[str, dict[str, Any]] = {}
        self._rows: dict[str, pa.Table] = {}
        self._seen = self._manifests()
        self.fixed: FixedTable | None = None
        if self.pipeline.families:
            _ = self.family  # an unknown family is an error before anything is written

    def fix(self, table: FixedTable, config: configuration.Config) -> None:
        """Use this table for its stage from now on, with the settings that it was made with."""
        self.config, self.fixed = config, table
        self.__dict__.pop("family", None)
        self._recipes.clear()
        self._rows.clear()

    def refresh(self) -> None:
        """Discard what is cached if a stage, in any process, has finished a run since the last call or the opening."""
        found = self._manifests()
        if found != self._seen:
            self._seen = found
            self._recipes.clear()
            self._rows.clear()

    def _manifests(self) -> frozenset[tuple[str, int, int]]:
        # A stage that finishes a run replaces its manifest.
        paths = self.path.glob("tables/*/*/manifest.json")
        return frozenset((str(p), (stat := p.stat()).st_mtime_ns, stat.st_ino) for p in paths)

    # Settings and stages

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def stage_names(self) -> tuple[str, ...]:
        return tuple(self.pipeline.stages)

    @functools.cached_property
    def family(self) -> Family:
        """Raises ValueError for an unknown family, or if the setting `components` names one that it lacks."""
        families: Mapping[str, Family] = load(self.pipeline.families)
        name = self.config.project.family or next(iter(families))
        if name not in families:
            near = nearest(name, families)
            raise ValueError(f"project.family must be one of {', '.join(families)}, got {name!r}{near}")
        self.config.project.check_components(families[name].folders)
        return families[name]

    def stage(self, name: str) -> Stage:
        """Raises ValueError, with the nearest name."""
        if name not in self.pipeline.stages:
            near = nearest(name, self.stage_names)
            raise ValueError(f"{name}: no such stage{near}; there are {', '.join(self.stage_names)}")
        return self.pipeline.stage(name)

    def allow_downloads(self) -> Project:
        self.fetch = True
        return self

    # Resources

    def resource(self, name: str) -> Any:
        """What a stage gets for a name in `needs`. Missing weights are fetched. Raises ValueError if they cannot be found."""
        found = self.pipeline.resources[name]
        if isinstance(found, Folder):
            return common_folder(getattr(self.config.sections[found.section], found.key), self.path)
        return self.family if isinstance(found, FamilyRecord) else self.component(name)

    def component(self, name: str, *, fetch: bool = True) -> Path:
        """The folder or file of a component's weights. Raises ValueError if they are missing or incomplete."""
        from pipeline.project import components

        return components.find(self.config.project, self.path, self.family, name, fetch=fetch)

    def weight_recipe(self, name: str) -> dict[str, Any]:
        """The sha256 of a component's files, and the fields of the family that `Weights.fields` lists."""
        self.family.require(name)  # before gigabytes are downloaded for nothing
        label = f"{self.family.name} {self.config.project.place(name)} {name}"
        # Weights of the text encoder may lie in the tokenizer's folder.
        given = self.family.files[name], name != "tokenizer"
        try:
            digest = self.hashes.component(label, self.component(name, fetch=False), *given)
        except ValueError:
            # Weights may be deleted to save space: the remembered hash then keeps their tables up to date.
            known = self.hashes.last_known(label)
            digest = known or self.hashes.component(label, self.component(name, fetch=self.fetch), *given)
        kind = self.pipeline.resources[name]
        assert isinstance(kind, Weights)
        return {"sha256": digest, **{fact: getattr(self.family, fact) for fact in kind.fields}}

    # Tables

    def recipe(self, name: str) -> dict[str, Any]:
        """What decides a table's rows, as plain data. Raises NotBuilt if it needs a table that is missing, ValueError
        for weights.
        """
        if self.fixed and self.fixed.stage == name:
            return dict(self.fixed.recipe)
        return self.fresh_recipe(name)

    def fresh_recipe(self, name: str) -> dict[str, Any]:
        """The recipe for the present settings, even if the stage's table is fixed."""
        if name not in self._recipes:
            stage = self.stage(name)
            weights = [need for need in stage.needs if isinstance(self.pipeline.resources[need], Weights)]
            self._recipes[name] = recipes.recipe(
                stage,
                self.config.sections[name],
                {need: self.weight_recipe(need) for need in weights},
                {read.name: recipes.recipe_id(self.recipe(read.name)) for read in stage.reads if read.tensors},
                stage.snapshot(self.context(stage)) if stage.snapshot else None,
            )
        return self._recipes[name]

    def current(self, name: str) -> TableFolder:
        """The table for the present settings; it may not exist. Raises as `recipe` does."""
        from pipeline.store.table import TableFolder

        if self.fixed and self.fixed.stage == name:
            return self.fixed.table
        return TableFolder(self.path / "tables" / name / recipes.recipe_id(self.recipe(name)), self.stage(name).writes)

    def folder(self, name: str) -> TableFolder:
        """The table to read from: `current` if it is built, else the newest of other settings, else one that does not exist."""
        from pipeline.store.table import TableFolder

        schema = self.stage(name).writes
        if self.fixed and self.fixed.stage == name:
            return self.fixed.table
        parent = self.path / "tables" / name
        try:
            found = self.current(name)
        except ValueError:  # weights or inputs are missing, so the recipe is unknown
            found = TableFolder(parent / "none", schema)
        if found.exists:
            return found
        manifests = sorted(parent.glob("*/manifest.json"), key=lambda p: p.stat().st_mtime)
        return TableFolder(manifests[-1].parent, schema) if manifests else found

    def built(self, schema: TableSchema, reader: str) -> TableFolder:
        """`current`, or NotBuilt with the command that builds it. `reader`: the stage or command that needs it."""
        found = self.current(schema.name)
        if not found.exists:
            raise NotBuilt(
                f"{reader} needs the table {schema.name}, which is not built for this configuration; "
                f"run: make {schema.name} PROJECT={shell_path(self.path)}",
                schema.name,
            )
        return found

    def inputs(self, name: str) -> dict[str, Input]:
        """The tables that a stage reads; optional ones if they exist. Raises NotBuilt."""
        stage = self.stage(name)
        folders = {read.name: self.built(read, name) for read in stage.reads}
        newest = {read.name: self.folder(read.name) for read in stage.optional}
        folders |= {read: found for read, found in newest.items() if found.exists}
        return {read: Input(folder.folder, folder.manifest()["lance_version"]) for read, folder in folders.items()}

    def context(self, stage: Stage, **replaced: Any) -> StageContext:
        """For calling a function of `stage` outside a run: no rows, reports go nowhere. `replaced`: fields of the context."""
        empty = pa.table({f.name: pa.array([], f.type) for f in stage.writes.stored})
        nothing: Callable[..., Any] = lambda *arguments: None  # noqa: E731
        fields: dict[str, Any] = {
            "config": self.config.sections[stage.name],
            "artifacts": self.path / "tables" / stage.name,
            "stored": empty,
            "pending": empty,
            "rows": lambda schema: self._read(schema, stage.name),
            "tensors": lambda schema: self._tensors(schema, stage.name),
            "files": lambda schema: self._files(schema, stage),
            "need": lambda name: self._need(stage, name),
            "write_artifact": nothing,
            "say": nothing,
            "progress": nothing,
            "stop": lambda: False,
            "root": self.path,
            "intact": self._intact,
        }
        return StageContext(**(fields | replaced))

    def _files(self, schema: TableSchema, stage: Stage) -> Path:
        optional = schema in stage.optional
        return (self.folder(schema.name) if optional else self.built(schema, stage.name)).folder / "artifacts"

    def _read(self, schema: TableSchema, reader: str) -> pa.Table:
        if schema.name not in self._rows:
            self._rows[schema.name] = self.built(schema, reader).rows()
        return self._rows[schema.name]

    def _tensors(self, schema: TableSchema, reader: str) -> ShardReader:
        from pipeline.store.reader import ShardReader

        # The rows as this project has read them: later ones are left out.
        return ShardReader(self.built(schema, reader).folder, self._read(schema, reader), schema)

    def _intact(self, schema: TableSchema, name: str) -> bool:
        """Whether a file of the table agrees with its checksum; one without a checksum only has to exist."""
        return not self.current(schema.name).checksums.damage(f"artifacts/{name}")

    def _need(self, stage: Stage, name: str) -> Any:
        assert name in stage.needs, f"{stage.name} does not list {name} in its needs"
        return self.resource(name)
