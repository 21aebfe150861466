"""The six laws, over every stage of every pipeline: purity, schema, key, resume, commit, release."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pyarrow as pa
import pytest

from pipeline import runner
from pipeline.errors import Stopped
from pipeline.project.project import Project
from pipeline.store.table import Writer
from stages.pipelines import Pipeline, Weights
from stages.retrieval import PIPELINE as RETRIEVAL
from stages.text_to_image import PIPELINE as TEXT_TO_IMAGE
from tests import projects, toy
from tests.projects import without
from tests.stages.retrieval.project import make as make_retrieval
from tests.toy.project import make as make_toy
from tests.vision_language import write_model


def make_described(folder: Path, weights: Path) -> Path:
    """A project of three images whose captions a model writes too, because it does not look for sidecars."""
    made = projects.make(folder, weights, images=3)
    write_model(made / "eye")
    projects.edit(made, "[captions]", '[descriptions]\nmodel = "eye"\nsources = ["metadata"]\nmost_tokens = 4\n\n[captions]')
    projects.edit(made, "[buckets]", projects.PROMPTS + "[buckets]")
    projects.edit(made, "steps = 6", "steps = 4")
    return made


MAKE: dict[str, Callable[[Path, Path], Path]] = {
    TEXT_TO_IMAGE.name: make_described,
    RETRIEVAL.name: lambda folder, weights: make_retrieval(folder, verbs=3, things=4),
    toy.PIPELINE.name: lambda folder, weights: make_toy(folder),
}
PIPELINES: tuple[Pipeline, ...] = (TEXT_TO_IMAGE, RETRIEVAL, toy.PIPELINE)
EVERY_STAGE = [pytest.param(p.name, name, id=f"{p.name}-{name}") for p in PIPELINES for name in p.stages]
CLOCKS = ("inode", "mtime_ns")  # of a copied file


def runtime(pipeline: Pipeline) -> dict[str, Any]:
    """Settings that may change no row: batches of one row, one worker, and more checkpoints."""
    found: dict[str, Any] = {"project.commit_seconds": 30.0, "train.memory": "whole", "train.checkpoint_every": 1}
    for name in pipeline.stages:
        fields = [field for field in dataclasses.fields(pipeline.stage(name).config) if field.metadata["kind"] == "runtime"]
        found |= {
            f"{name}.{field.name}": 1 for field in fields if field.name in ("batch_size", "workers", "timeout", "keep_states")
        }
    return found


RUNTIME = {pipeline.name: runtime(pipeline) for pipeline in PIPELINES}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> Callable[[str], Path]:
    """A function that returns a finished project of a pipeline. It is made once and never changed."""

    @functools.cache
    def project(pipeline: str) -> Path:
        folder = MAKE[pipeline](tmp_path_factory.mktemp("finished") / "project", tiny_weights)
        build(folder)
        return folder

    return project


def build(folder: Path, *names: str, overrides: dict[str, Any] | None = None) -> None:
    """Run these stages, by default all, each with a new Project as a process of its own would have."""
    for name in names or Project(folder).stage_names:
        runner.run(Project(folder, overrides or {}, fetch=True), name, projects.Silent())


def rows(folder: Path, name: str, overrides: dict[str, Any] | None = None) -> pa.Table:
    found = projects.content(folder, name, overrides or {})
    return found.drop_columns([column for column in CLOCKS if column in found.column_names])


@contextlib.contextmanager
def watched(action: Callable[[int, pa.RecordBatch], None]) -> Iterator[None]:
    """Call `action` with the number of every batch, from 1, after the writer has taken it."""
    real, count = Writer.append, 0

    def append(self: Writer, batch: pa.RecordBatch) -> None:
        nonlocal count
        real(self, batch)
        count += 1
        action(count, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Writer, "append", append)
        yield


@pytest.fixture(scope="module")
def rebuilt(finished, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, list[list[str]], int]]:
    """A stage built again with other runtime settings and each batch committed twice: (project, columns of each batch, bytes by
    which MLX's memory grew).
    """

    @functools.cache
    def build_again(pipeline: str, name: str) -> tuple[Path, list[list[str]], int]:
        folder = without(finished(pipeline), tmp_path_factory.mktemp("rebuilt") / "project", name)
        seen: list[list[str]] = []
        real, before = Writer.append, mx.get_active_memory()

        def twice(self: Writer, batch: pa.RecordBatch) -> None:
            seen.append(batch.schema.names)
            real(self, batch)
            if len(seen) == 1:  # the others are together in a commit, as long as `commit_seconds` have not passed
                self.flush()
            real(self, batch)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Writer, "append", twice)
            project = Project(folder, RUNTIME[pipeline], fetch=True)  # it stays open while memory is measured
            runner.run(project, name, projects.Silent())
        return folder, seen, mx.get_active_memory() - before

    return build_again


@pytest.mark.parametrize(("pipeline", "name"), EVERY_STAGE)
def test_purity_and_key_rows_depend_neither_on_runtime_settings_nor_on_batches_that_are_committed_twice(
    pipeline, name, finished, rebuilt
):
    folder, _, _ = rebuilt(pipeline, name)
    assert Project(folder).recipe(name) == Project(folder, RUNTIME[pipeline]).recipe(name)
    assert rows(folder, name, RUNTIME[pipeline]) == rows(finished(pipeline), name)


@pytest.mark.parametrize(("pipeline", "name"), EVERY_STAGE)
def test_schema_every_batch_has_exactly_the_columns_of_its_table(pipeline, name, finished, rebuilt):
    _, seen, _ = rebuilt(pipeline, name)
    schema = Project(finished(pipeline)).stage(name).writes
    assert seen and all(names == schema.batch.names for names in seen)


@pytest.mark.parametrize(("pipeline", "name"), EVERY_STAGE)
def test_release_mlx_memory_is_back_where_it_was_when_a_stage_ends(pipeline, name, rebuilt):
    _, _, grown = rebuilt(pipeline, name)
    assert grown <= 4096


@pytest.mark.parametrize(("pipeline", "name"), EVERY_STAGE)
def test_commit_and_resume_a_run_that_fails_shows_nothing_and_after_two_stops_ends_where_an_unbroken_run_ends(
    pipeline, name, finished, tmp_path, monkeypatch
):
    folder = without(finished(pipeline), tmp_path / "project", name)
    small = RUNTIME[pipeline] | {"project.commit_seconds": 0.0}  # batches of one row, each committed
    stop = None
    real = runner.interruptible

    @contextlib.contextmanager
    def interruptible(say: Any) -> Iterator[Any]:
        nonlocal stop
        with real() as event:
            stop = event
            yield event

    monkeypatch.setattr(runner, "interruptible", interruptible)

    def fail(count: int, batch: pa.RecordBatch) -> None:
        raise KeyError("a mistake in the middle")

    with watched(fail), pytest.raises(KeyError):
        build(folder, name, overrides=small)
    assert not Project(folder).current(name).exists
    for after in (1, 2):
        with watched(lambda count, batch, after=after: stop.set() if count == after else None), contextlib.suppress(Stopped):
            build(folder, name, overrides=small)
    build(folder, name)
    assert rows(folder, name) == rows(finished(pipeline), name)
    assert not list((folder / "tables" / name).rglob(".tmp-*"))


@pytest.mark.parametrize(("pipeline", "name"), EVERY_STAGE)
def test_release_a_stage_with_nothing_to_do_asks_for_no_weights(pipeline, name, finished, monkeypatch):
    folder, real = finished(pipeline), Project.resource

    def refuse(self: Project, needed: str, stage: str = "") -> Any:
        assert not isinstance(self.pipeline.resources[needed], Weights), f"{name} asked for {needed}"
        return real(self, needed, stage)

    monkeypatch.setattr(Project, "resource", refuse)
    outcome = runner.run(Project(folder), name, projects.Silent())
    assert outcome.up_to_date
