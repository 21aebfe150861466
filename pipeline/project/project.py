"""A project: its folder, its configuration, and where each of its tables lies."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

import stages
from pipeline.project import config as configuration
from pipeline.project import recipe as fingerprint
from pipeline.store.disk import CHECKOUT, from_home
from pipeline.store.table import TableFolder
from schemas.table import TableSchema
from stages.models.family import Family
from stages.models.text.encoder import refuse
from stages.stage import Stage, StageContext
from stages.text_to_image.families import family

# What a family's record, and no file, says about how a component is used.
RECORD = {
    "text_encoder": ("text_kind", "text_layers", "text_tokens"),
    "transformer": ("guidance_embedded",),
}


class NotBuilt(ValueError):  # noqa: N818  (a state that the user can mend, said in one line)
    """A table that another needs is not there."""


class Project:
    """One project folder: `project.toml`, the images, `tables/`. Nothing is read before it is asked for."""

    def __init__(self, path: Path, config: configuration.Config, *, fetch: bool = False) -> None:
        self.path = path
        self.fetch = fetch  # whether weights that were never here may be downloaded: only to run a stage
        self.config = config
        self.stage_names = stages.PIPELINES[config.project.pipeline]
        self.family: Family = family(config.project.family)
        self.hashes = fingerprint.FileHashes(path / "tables" / "weights.json")
        self._recipes: dict[str, dict[str, Any]] = {}
        self._rows: dict[str, pa.Table] = {}  # what was read once stays: one command sees one state of its inputs

    @classmethod
    def open(cls, path: str | Path, overrides: Iterable[str] = (), *, fetch: bool = False) -> Project:
        """The project in that folder. ValueError in one line if it is none or its configuration is wrong."""
        folder = from_home(path)
        if not folder.is_dir():
            what = "is a file, not a project's folder" if folder.exists() else "no such folder"
            raise ValueError(f"{folder}: {what}; `latentmill init FOLDER --images IMAGES` makes a project")
        return cls(folder, configuration.load(folder / configuration.FILE, overrides), fetch=fetch)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @property
    def source(self) -> Path:
        """The image folder; never written."""
        return self.path / from_home(self.config.sections["images"].folder)

    def stage(self, stage_name: str) -> Stage:
        """The stage of that stage_name."""
        if stage_name not in self.stage_names:
            near = configuration.near(stage_name, self.stage_names)
            raise ValueError(f"{stage_name}: no such stage{near}; there are {', '.join(self.stage_names)}")
        return stages.find(stage_name)

    # Weights

    def component(self, name: str, *, fetch: bool = True) -> Path:
        """Where one component's weights lie: a folder or a file. They are fetched or made if they may be."""
        from pipeline.project import hub
        from stages.models.weights import locate

        root = hub.resolve(self.config.project.weights, self.path, self.family, (name,), fetch=fetch)
        return locate(root, name, self.family)

    def weight_recipe(self, name: str) -> dict[str, Any]:
        """What a component is: the hash of its files, and what the family's record adds.

        Weights that were here once and are gone are known by the hash they had; only what was never here is fetched.
        """
        if name == "text_encoder":  # before 35 GB are fetched for nothing
            refuse(self.family)
        label = f"{self.config.project.family} {self.config.project.weights} {name}"
        try:
            digest = self.hashes.component(label, self.component(name, fetch=False))
        except ValueError:
            digest = self.hashes.last(label) or self.hashes.component(label, self.component(name, fetch=self.fetch))
        return {"sha256": digest, **{fact: getattr(self.family, fact) for fact in RECORD.get(name, ())}}

    # Tables

    def recipe(self, stage_name: str) -> dict[str, Any]:
        """The recipe that the table has under the present configuration. NotBuilt if it depends on a table that is missing."""
        if stage_name not in self._recipes:
            stage = self.stage(stage_name)
            self._recipes[stage_name] = fingerprint.recipe(
                stage,
                self.config.sections[stage_name],
                {name: self.weight_recipe(name) for name in stage.loads},
                {read.name: fingerprint.short(self.recipe(read.name)) for read in stage.reads if read.tensor},
                stage.snapshot(self.context(stage)) if stage.snapshot else None,
            )
        return self._recipes[stage_name]

    def current(self, stage_name: str) -> TableFolder:
        """The table's folder under the present configuration, built or not."""
        return TableFolder(
            self.path / "tables" / stage_name / fingerprint.short(self.recipe(stage_name)), self.stage(stage_name).writes
        )

    def folder(self, stage_name: str) -> TableFolder:
        """The table to look at: the current one, or, where that is not built, the one written last."""
        schema = self.stage(stage_name).writes
        parent = self.path / "tables" / stage_name
        try:
            found = self.current(stage_name)
        except ValueError:  # weights or inputs are missing, so the recipe is unknown
            found = TableFolder(parent / "none", schema)
        if found.exists:
            return found
        manifests = sorted(parent.glob("*/manifest.json"), key=lambda p: p.stat().st_mtime)
        return TableFolder(manifests[-1].parent, schema) if manifests else found

    def built(self, schema: TableSchema, reader: str) -> TableFolder:
        """A table that a stage reads. NotBuilt names the command that builds it."""
        found = self.current(schema.name)
        if not found.exists:
            raise NotBuilt(
                f"{reader} needs the table {schema.name}, which is not built for this configuration; "
                f"run: make {schema.name} PROJECT={spelled(self.path)}"
            )
        return found

    # Context

    def context(self, stage: Stage, **given: Any) -> StageContext:
        """What `stage` is given, less what only a running stage has."""
        empty = pa.table({f.name: pa.array([], f.type) for f in stage.writes.stored})
        nothing: Callable[..., Any] = lambda *arguments: None  # noqa: E731
        parts: dict[str, Any] = {
            "config": self.config.sections[stage.name],
            "family": self.family,
            "source": self.source,
            "artifacts": self.path / "tables" / stage.name,
            "stored": empty,
            "pending": empty,
            "rows": lambda schema: self._read(schema, stage.name),
            "tensors": lambda schema: self.built(schema, stage.name).tensors(),
            "weights": lambda name: self._weights(stage, name),
            "write_artifact": nothing,
            "say": nothing,
            "progress": nothing,
            "stop": lambda: False,
            "root": self.path,
        }
        return StageContext(**(parts | given))

    def _read(self, schema: TableSchema, reader: str) -> pa.Table:
        if schema.name not in self._rows:
            self._rows[schema.name] = self.built(schema, reader).rows()
        return self._rows[schema.name]

    def _weights(self, stage: Stage, name: str) -> Path:
        """A component's files; for a table that the stage reads, the folder of the files that its rows name."""
        if name in [read.name for read in stage.reads]:
            return self.built(stages.find(name).writes, stage.name).folder / "artifacts"
        assert name in stage.loads, f"{stage.name} does not say that it loads {name}"
        return self.component(name)


def spelled(folder: Path) -> str:
    """A project's folder as a command line in the checkout has it, whatever characters it holds."""
    same = folder.is_absolute() or (CHECKOUT / folder).resolve() == folder.resolve()
    return shlex.quote(str(folder if same else folder.resolve()))
