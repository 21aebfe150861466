"""A project: its folder, settings, resources and the folders of its tables. `pipeline.api` adds the methods for users.

This module imports pyarrow and little else; the code that reads tables is imported by the methods that need it.
"""

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
    """A table that a project uses for one stage, whatever settings the project has. For example, the user can choose the
    table of an earlier training run. `stage` is the name of the stage. `table` is the folder of the table. `recipe` is a dict
    of what decided the table's content, such as settings and weights.
    """

    stage: str
    table: TableFolder
    recipe: Mapping[str, Any]


class Project:
    """A project: the folder `path` with project.toml, input files and the folder tables/. `overrides` replace settings. They
    are a mapping such as {"train.steps": 200}, or texts such as "train.steps=200". If `fetch` is True, missing weights may be
    downloaded. Raises ValueError if the folder holds no project or a setting is wrong.

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
        """Use the table `table` for its stage from now on, and give this project the settings `config`. `table` names the stage
        and the table's folder. `config` holds the settings of all sections, usually those that the table was made with.
        """
        self.config, self.fixed = config, table
        self.__dict__.pop("family", None)
        self._recipes.clear()
        self._rows.clear()

    def refresh(self) -> None:
        """Discard the cached recipes and rows of all tables if a stage has finished a run since the previous call of
        `refresh`. The run may be one of another process. The first call considers runs since the project was opened.
        """
        found = self._manifests()
        if found != self._seen:
            self._seen = found
            self._recipes.clear()
            self._rows.clear()

    def _manifests(self) -> frozenset[tuple[str, int, int]]:
        """Return a set of `(path, modification time in ns, inode)`, one for the manifest of every table. A manifest is
        the file manifest.json in a table's folder. A stage that finishes a run replaces it, so the set changes.
        """
        paths = self.path.glob("tables/*/*/manifest.json")
        return frozenset((str(p), (stat := p.stat()).st_mtime_ns, stat.st_ino) for p in paths)

    # Settings and stages

    @property
    def name(self) -> str:
        """The name of the project: the last part of its folder's path."""
        return self.path.resolve().name

    @property
    def stage_names(self) -> tuple[str, ...]:
        """The names of the pipeline's stages, in the order in which they run."""
        return tuple(self.pipeline.stages)

    @functools.cached_property
    def family(self) -> Family:
        """The record of the project's model family: its sizes, files and functions. The section [project] names the
        family; the default is the pipeline's first family. Raises ValueError if there is no family of that name, or if
        the setting `components` names a component that the family lacks. The message suggests the nearest name.
        """
        families: Mapping[str, Family] = load(self.pipeline.families)
        name = self.config.project.family or next(iter(families))
        if name not in families:
            near = nearest(name, families)
            raise ValueError(f"project.family must be one of {', '.join(families)}, got {name!r}{near}")
        self.config.project.check_components(families[name].folders)
        return families[name]

    def stage(self, name: str) -> Stage:
        """Return the stage called `name`, which writes the table of that name. Raises ValueError, with the nearest name, if
        there is none.
        """
        if name not in self.pipeline.stages:
            near = nearest(name, self.stage_names)
            raise ValueError(f"{name}: no such stage{near}; there are {', '.join(self.stage_names)}")
        return self.pipeline.stage(name)

    def allow_downloads(self) -> Project:
        """Allow this project to download missing weights from now on. Return the project itself."""
        self.fetch = True
        return self

    # Resources

    def resource(self, name: str) -> Any:
        """Return what a stage gets if it needs the resource `name`. If the resource is a folder, return its path. If it is the
        weights of a model component, return their path. Missing weights are downloaded or generated. If it is the model family,
        return the family's record. Raises KeyError if the pipeline has no resource of this name, ValueError if weights cannot
        be found.
        """
        found = self.pipeline.resources[name]
        if isinstance(found, Folder):
            return common_folder(getattr(self.config.sections[found.section], found.key), self.path)
        return self.family if isinstance(found, FamilyRecord) else self.component(name)

    def component(self, name: str, *, fetch: bool = True) -> Path:
        """Return the path of the weights of one model component: a folder or a file. `name` is the component, such as
        "transformer". Missing weights are downloaded or generated if `fetch` is True. Raises ValueError if they are
        still missing or incomplete.
        """
        from pipeline.project import components

        return components.find(self.config.project, self.path, self.family, name, fetch=fetch)

    def weight_recipe(self, name: str) -> dict[str, Any]:
        """Return a dict that identifies the weights of the model component `name`, such as "text_encoder". The key "sha256"
        has the hash of the component's files, in hex digits. The other keys are facts about the model family that change what
        the component computes, such as "text_layers". Raises ValueError if the weights cannot be found.

        These facts are the fields of the family's record that `Weights.fields` lists. Weights that were never on this machine
        are downloaded if the project allows downloads. For deleted weights the remembered hash is used.
        """
        self.family.require(name)  # before gigabytes are downloaded for nothing
        label = f"{self.family.name} {self.config.project.place(name)} {name}"
        given = self.family.files[name], name != "tokenizer"
        try:
            digest = self.hashes.component(label, self.component(name, fetch=False), *given)
        except ValueError:
            known = self.hashes.last_known(label)
            digest = known or self.hashes.component(label, self.component(name, fetch=self.fetch), *given)
        kind = self.pipeline.resources[name]
        assert isinstance(kind, Weights)
        return {"sha256": digest, **{fact: getattr(self.family, fact) for fact in kind.fields}}

    # Tables

    def recipe(self, name: str) -> dict[str, Any]:
        """Return the recipe of the table `name` for the present settings, as plain data. A recipe is a record of
        what decides a stage's result, such as its settings and the hashes of its weights. Its hash is the name of the
        table's folder. Raises NotBuilt if a table that the recipe needs is missing, ValueError if weights cannot be found.
        """
        if self.fixed and self.fixed.stage == name:
            return dict(self.fixed.recipe)
        return self.fresh_recipe(name)

    def fresh_recipe(self, name: str) -> dict[str, Any]:
        """Return the recipe of the table `name` for the present settings, as plain data. A recipe records what decides a stage's
        result, such as weights. If the method `fix` set an earlier run's table for the stage, `recipe` returns that run's recipe.
        This method makes a new one. Raises NotBuilt if an input table is missing, ValueError if weights cannot be found.
        """
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
        """Return the folder of the table `name` for the present settings. The table may not exist yet. If the project
        was given a fixed table for this stage (method `fix`), the folder of the fixed table is returned. Raises
        NotBuilt if an input table is missing. Raises ValueError if weights cannot be found.
        """
        from pipeline.store.table import TableFolder

        if self.fixed and self.fixed.stage == name:
            return self.fixed.table
        return TableFolder(self.path / "tables" / name / recipes.recipe_id(self.recipe(name)), self.stage(name).writes)

    def folder(self, name: str) -> TableFolder:
        """Return the folder of the table `name` to read from. If the table for the present settings is built, this is
        its folder. Otherwise it is the folder of the newest table of other settings. If no table is built, the
        attribute `exists` of the result is False.
        """
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
        """Return the folder of the table with this `schema` for the present settings. `reader` is the stage or command that
        reads the table. Raises NotBuilt if the table is missing. The message names `reader` and the command that builds the
        table.
        """
        found = self.current(schema.name)
        if not found.exists:
            raise NotBuilt(
                f"{reader} needs the table {schema.name}, which is not built for this configuration; "
                f"run: make {schema.name} PROJECT={shell_path(self.path)}",
                schema.name,
            )
        return found

    def inputs(self, name: str) -> dict[str, Input]:
        """Return the tables that the stage `name` reads, as a dict from table name to `Input`. An `Input` holds the
        table's folder and the version of its rows. An optional table is left out if it does not exist. Raises NotBuilt
        if a required table is missing.
        """
        stage = self.stage(name)
        folders = {read.name: self.built(read, name) for read in stage.reads}
        newest = {read.name: self.folder(read.name) for read in stage.optional}
        folders |= {read: found for read, found in newest.items() if found.exists}
        return {read: Input(folder.folder, folder.manifest()["lance_version"]) for read, folder in folders.items()}

    def context(self, stage: Stage, **replaced: Any) -> StageContext:
        """Return a context for calling a function of `stage`, such as `stage.wants`, outside a run. The function reads tables
        through the context. By default, its fields `stored` (rows that exist) and `pending` (rows to compute) are empty, and
        writing and reporting do nothing. Keyword arguments (`**replaced`) replace fields of the context, as in `stored=rows`.
        """
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
        """Return the folder `artifacts` of a table that `stage` reads. It holds the files that the table's rows name. `schema`
        describes the table. If an optional table was not built, the folder may not exist. Raises NotBuilt if a required table was
        not built.
        """
        optional = schema in stage.optional
        return (self.folder(schema.name) if optional else self.built(schema, stage.name)).folder / "artifacts"

    def _read(self, schema: TableSchema, reader: str) -> pa.Table:
        if schema.name not in self._rows:
            self._rows[schema.name] = self.built(schema, reader).rows()
        return self._rows[schema.name]

    def _tensors(self, schema: TableSchema, reader: str) -> ShardReader:
        """Return a reader for the tensors of the table that `schema` describes. `reader` is the name of the stage that
        reads the table, for error messages. Rows that are written after the project has read the table are left out.
        Raises NotBuilt if the table is missing.
        """
        from pipeline.store.reader import ShardReader

        return ShardReader(self.built(schema, reader).folder, self._read(schema, reader), schema)

    def _intact(self, schema: TableSchema, name: str) -> bool:
        """Return True if an artifact (a file that a row of a table names) is intact. `schema` describes the table. `name` is
        the file's path below the table's folder `artifacts`. The file is intact if it agrees with its recorded checksum. If it
        has none, it only has to exist.
        """
        return not self.current(schema.name).checksums.damage(f"artifacts/{name}")

    def _need(self, stage: Stage, name: str) -> Any:
        assert name in stage.needs, f"{stage.name} does not list {name} in its needs"
        return self.resource(name)
