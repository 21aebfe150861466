"""A project: its folder, settings, resources and the folders of its tables. `pipeline.api` adds the methods for users."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import stages
from pipeline.process import refuse_fork, require_address_space
from pipeline.project import config as configuration
from pipeline.project import recipe as recipes
from pipeline.project.config import Overrides
from pipeline.project.stage_run import Kept, Lazy, Write, not_built, open_run
from stages.models.family import TOKENIZER, choose, twin
from stages.pipelines import FamilyRecord, Folder, Weights, load
from stages.run import Report, Run
from stages.settings import from_home, nearest, setting_path
from stages.stage import Input, Stage, WorkUnit

if TYPE_CHECKING:
    from pipeline.store.table import TableFolder
    from schemas.table import Among, TableSchema
    from stages.models.family import Family

WRITTEN = ("tables", "exports", "weights", "tracking", "queue")  # a project from elsewhere could have any folder changed


@dataclass(frozen=True)
class FixedTable:
    """A table that a project uses for one stage, whatever its settings, such as that of an earlier training run."""

    stage: str
    table: TableFolder
    recipe: dict[str, Any]  # that the table was made by


class Project:
    """A folder with project.toml, input files and tables/. Raises ValueError if it holds no project or a setting is wrong.

    Tables are read at their first use and cached until `refresh` finds that a stage has run, in this or another process.
    Between two runs all methods therefore see the same state of the tables.
    """

    def __init__(self, path: str | Path, overrides: Overrides = (), *, fetch: bool = False, text: str | None = None) -> None:
        """`text`: what project.toml would contain, to see what that would do."""
        require_address_space()
        refuse_fork(opening=True)
        folder = from_home(path)
        if not folder.is_dir():
            what = "is a file, not a project's folder" if folder.exists() else "no such folder"
            raise ValueError(f"{folder}: {what}; `latentmill init --help` explains how to make a project")
        if any(ord(character) < 32 or ord(character) == 127 for character in str(folder.absolute())):
            raise ValueError(f"{folder.absolute()}: a project's path may have no line break and no other control character")
        for name in WRITTEN:
            if (place := folder / name).is_symlink() and not place.resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"{place} is a link out of the project, where nothing is written: move the folder itself here")
        self.path = folder
        self.overrides = overrides
        self.fetch = fetch
        self.config = configuration.load(folder / configuration.FILE, overrides, text)
        self.pipeline = stages.pipeline(self.config.project.pipeline)
        self.hashes = recipes.FileHashes(folder / "tables" / "weights.json")
        self.fixed: FixedTable | None = None
        self._forget()
        self._seen = self._manifests()
        if self.pipeline.families:
            _ = self.family  # an unknown family is an error before anything is written

    def fix(self, table: FixedTable, config: configuration.Config) -> None:
        """Use this table for its stage from now on, with the settings that it was made with."""
        self.config, self.fixed = config, table
        self.__dict__.pop("family", None)
        self._forget()

    def _forget(self) -> None:
        self._recipes: dict[str, dict[str, Any]] = {self.fixed.stage: self.fixed.recipe} if self.fixed else {}
        self.kept = Kept()

    def refresh(self) -> None:
        """Discard what is cached if a stage, in any process, has finished a run since the last call or the opening."""
        # Always: files that a stage lists or hashes may change while no stage runs.
        self.kept.known.clear()
        found = self._manifests()
        if found != self._seen:
            self._seen = found
            self._forget()

    def _manifests(self) -> frozenset[tuple[str, int, int]]:
        # A stage that finishes a run replaces its manifest.
        # Path.glob raises if a temporary folder is deleted meanwhile.
        paths = glob("tables/*/*/manifest.json", root_dir=self.path)  # noqa: PTH207
        return frozenset((path, (stat := (self.path / path).stat()).st_mtime_ns, stat.st_ino) for path in paths)

    # Settings and stages

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def chain(self, name: str) -> list[str]:
        """The stages that run before `name`, so that its inputs are up to date."""
        return self.pipeline.chain(self.stage(name).name, self.config.given)

    @property
    def stage_names(self) -> tuple[str, ...]:
        return tuple(self.pipeline.stages)

    @property
    def listed(self) -> tuple[str, ...]:
        """Without stages that only a setting such as [train.slider] brings, if it is not given and nothing is stored."""

        def has(name: str) -> bool:
            when = "always" if name in self.pipeline.results else self.pipeline.first.get(name, "always")
            return when in ("always", name) or when in self.config.given or self.folder(name).exists

        return tuple(name for name in self.stage_names if has(name))

    @functools.cached_property
    def family(self) -> Family:
        """Raises ValueError for an unknown family, or if the setting `components` names one that it lacks."""
        families: Mapping[str, Family] = load(self.pipeline.families)
        name = self.config.project.family or next(iter(families))
        try:
            found = choose(families, name)
        except ValueError as error:
            raise ValueError(f"project.{error}") from None
        known = list(found.folders)
        for each in self.config.project.components or {}:
            if each not in known:
                raise ValueError(f"project.components must name any of {', '.join(known)}, got {each!r}{nearest(each, known)}")
        return found

    def changed(self, section: str, **settings: Any) -> Project:
        """This project with other settings of one section; nothing is written."""
        other = copy.copy(self)
        own = replace(self.config.sections[section], **settings)
        other.config = replace(self.config, sections={**self.config.sections, section: own})
        other._forget()
        return other

    def family_of(self, stage: str) -> Family:
        """The family that a stage computes with. Raises ValueError if its setting `family` names one that cannot do that."""
        if not self.stage(stage).drawn_by:
            return self.family
        section = self.config.sections[stage]
        if (given := section.family) in ("", self.family.name):
            if section.weights:
                raise ValueError(
                    f"{stage}.weights must be empty without another {stage}.family: [project] says where its own lie"
                )
            return self.family
        families: Mapping[str, Family] = load(self.pipeline.families)
        distilled = twin(families, self.family)
        related = [each for each in (self.family.name, distilled and distilled.name, self.family.base) if each]
        if given not in related:
            raise ValueError(f"{stage}.family must be {' or '.join(related)}, which the adapter fits, got {given!r}")
        return families[given]

    def stage(self, name: str) -> Stage:
        """Raises ValueError, with the nearest name."""
        if name not in self.pipeline.stages:
            near = nearest(name, self.stage_names)
            raise ValueError(f"{name}: no such stage{near}; there are {', '.join(self.stage_names)}")
        return self.pipeline.stage(name)

    # Resources

    def resource(self, name: str, stage: str = "") -> Any:
        """What a stage gets for a name in `needs`. Missing weights are fetched. Raises ValueError if they cannot be found."""
        found = self.pipeline.resources[name]
        if isinstance(found, Folder):
            given = getattr(self.config.sections[found.section], found.key)
            paths = [setting_path(path, self.path) for path in ((given,) if isinstance(given, str) else given)]
            if not paths:
                return self.path
            # Links are resolved only to find the folder of several paths.
            return without_dots(paths[0]) if len(paths) == 1 else Path(os.path.commonpath([path.resolve() for path in paths]))
        return self.source(name, stage)[0] if isinstance(found, FamilyRecord) else self.component(name, stage)

    def source(self, name: str, stage: str = "") -> tuple[Family, configuration.ProjectConfig, str]:
        """The family of a resource, where its weights lie, and the setting that says so if it is the stage's."""
        if not stage or name not in self.stage(stage).drawn_by or (family := self.family_of(stage)) is self.family:
            return self.family, self.config.project, ""
        place = self.config.sections[stage].weights
        settings = replace(self.config.project, weights="", components={name: place} if place else None)
        return family, settings, f"{stage}.weights"

    def component(self, name: str, stage: str = "", *, fetch: bool = True) -> Path:
        """The folder or file of a component's weights, as a stage computes with them. ValueError if missing or incomplete."""
        from pipeline.project import weights

        family, settings, key = self.source(name, stage)
        return weights.find(settings, self.path, family, name, fetch=fetch, key=key)

    def weight_recipe(self, name: str, stage: str = "") -> dict[str, Any]:
        """The sha256 of a component's files, and the fields of the family that `Weights.fields` lists."""
        family, settings, _ = self.source(name, stage)
        family.require(name)  # before gigabytes are downloaded for nothing
        label = f"{family.name} {settings.place(name)} {name}"
        # Weights of the text encoder may lie in the tokenizer's folder.
        given = family.files[name], name != TOKENIZER
        try:
            digest = self.hashes.component(label, self.component(name, stage, fetch=False), *given)
        except ValueError:
            # Weights may be deleted to save space: the remembered hash then keeps their tables up to date.
            known = self.hashes.known["components"].get(label)
            digest = known or self.hashes.component(label, self.component(name, stage, fetch=self.fetch), *given)
        kind = self.pipeline.resources[name]
        assert isinstance(kind, Weights)
        return {"sha256": digest, **{fact: getattr(family, fact) for fact in kind.fields}}

    # Tables

    def recipe(self, name: str) -> dict[str, Any]:
        """What decides a table's rows, as plain data. NotBuilt if it needs a table that is missing, ValueError for weights."""
        if name not in self._recipes:
            self._recipes[name] = self.fresh_recipe(name)
        return self._recipes[name]

    def fresh_recipe(self, name: str, inputs: Mapping[str, Input] | None = None) -> dict[str, Any]:
        """The recipe for the present settings, even if the table is fixed. `inputs`: instead of the tables that it reads."""
        stage = self.stage(name)
        weights = [need for need in stage.needs if isinstance(self.pipeline.resources[need], Weights)]
        return recipes.recipe(
            stage,
            self.config.sections[name],
            {need: self.weight_recipe(need, name) for need in weights},
            {read.name: recipes.recipe_id(self.recipe(read.name)) for read in stage.reads if read.tensors},
            stage.snapshot(self.open(name, inputs=inputs)) if stage.snapshot else None,
            stage.content(self.open(name, inputs=inputs)) if stage.content else {},
        )

    def current(self, name: str, inputs: Mapping[str, Input] | None = None) -> TableFolder:
        """The table for the present settings; it may not exist. Raises as `recipe` does. `inputs` as for `fresh_recipe`."""
        if self.fixed and self.fixed.stage == name:
            return self.fixed.table
        recipe = self.recipe(name) if inputs is None else self.fresh_recipe(name, inputs)
        return self.kept.table(self.path / "tables" / name / recipes.recipe_id(recipe), self.stage(name).writes)

    def folder(self, name: str) -> TableFolder:
        """The table to read from: `current` if it is built, else the newest of other settings, else one that does not exist."""
        schema = self.stage(name).writes
        parent = self.path / "tables" / name
        try:
            found = self.current(name)
        except ValueError:  # weights or inputs are missing, so the recipe is unknown
            found = self.kept.table(parent / "none", schema)
        if found.exists or (self.fixed and self.fixed.stage == name):
            return found
        manifests = sorted(parent.glob("*/manifest.json"), key=lambda p: p.stat().st_mtime)
        return self.kept.table(manifests[-1].parent, schema) if manifests else found

    def built(self, schema: TableSchema, reader: str) -> TableFolder:
        """`current`, or NotBuilt with the command that builds it. `reader`: the stage or command that needs it."""
        found = self.current(schema.name)
        if not found.exists:
            raise not_built(schema.name, reader, self.path)
        return found

    def inputs(self, name: str) -> dict[str, Input]:
        """The tables that a stage reads, at their present versions; optional ones if they exist. Raises NotBuilt."""
        found = {}
        for each in (*(stage := self.stage(name)).reads, *stage.optional):
            with contextlib.suppress(KeyError):  # an optional table that is not built
                one = self.input(stage, each.name)
                found[each.name] = replace(one, version=self.folder(each.name).manifest()["lance_version"])
        return found

    def rows(self, schema: TableSchema, reader: str, columns: Sequence[str] = (), among: Among | None = None) -> pa.Table:
        """The rows of a built table, as `stages.run.Inputs.rows`. Raises NotBuilt."""
        return self.kept.read(self.built(schema, reader), None, columns, among)

    def open(
        self,
        name: str,
        report: Report | None = None,
        *,
        artifacts: Path | None = None,
        inputs: Mapping[str, Input] | None = None,
        stored: pa.Table | None = None,
        write: Write | None = None,
        provenance: Mapping[str, str] | None = None,
    ) -> Run[Any]:
        """A run of a stage, before its pending rows are known. Outside the runner it has no rows and writes nothing."""
        stage = self.stage(name)
        empty = pa.table({f.name: pa.array([], f.type) for f in stage.writes.stored})
        unit = WorkUnit(
            stage=self.pipeline.stages[name],
            config=self.config.sections[name],
            pending=empty,
            stored=empty if stored is None else stored,
            inputs=Lazy([each.name for each in (*stage.reads, *stage.optional)], functools.partial(self.input, stage))
            if inputs is None
            else inputs,
            needs=Lazy(stage.needs, functools.partial(self.resource, stage=name)),
            artifacts=artifacts or self.path / "tables" / name,
            root=self.path,
            provenance=provenance or {},
        )
        return open_run(unit, report, write, self.kept if inputs is None else Kept())

    def input(self, stage: Stage, name: str) -> Input:
        if any(name == schema.name for schema in stage.reads):
            return Input(self.built(self.stage(name).writes, stage.name).folder)
        found = self.folder(name)
        if not found.exists:
            raise KeyError(name)
        with contextlib.suppress(ValueError):  # weights or inputs are missing, so the recipe is unknown
            return Input(found.folder, current=found.folder == self.current(name).folder)
        return Input(found.folder, current=False)


def without_dots(path: Path) -> Path:
    """Without "..", as messages show it. The last name may be a link, and stays as it is."""
    if ".." not in path.parts:
        return path
    return path.resolve() if path.name == ".." else path.parent.resolve() / path.name
