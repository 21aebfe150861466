"""Units whose input files travel as bytes give the rows of units that see the files."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

import stages
from pipeline.on_ray import Mirror, Packer, lasting_files
from pipeline.project.project import Project
from pipeline.work import divide, perform
from stages.pipelines import Folder, Pipeline
from stages.stage import Artifact
from stages.text_to_image.captions.stage import CaptionsConfig
from stages.text_to_image.images.folder import FolderConfig
from stages.text_to_image.images.stage import ImagesConfig
from stages.text_to_image.samples.config import SamplesConfig
from tests.pipeline.test_work import DIVISIBLE, ROWS, finished  # noqa: F401  a fixture
from tests.projects import without

CLOCKS = ("inode", "mtime_ns", "seconds")


class Store:
    """Where packed bytes lie: `put` returns a number, `get` the bytes."""

    def __init__(self) -> None:
        self.held: list[bytes] = []

    def put(self, content: bytes) -> int:
        self.held.append(content)
        return len(self.held) - 1

    def get(self, reference: int) -> bytes:
        return self.held[reference]


def plain(items: list[pa.RecordBatch | Artifact]) -> list:
    """The items of a unit without what clocks decide: some columns, and the stored latents of `samples`, which say their time."""
    batches = [item for item in items if isinstance(item, pa.RecordBatch)]
    files = [item for item in items if isinstance(item, Artifact)]
    rows = [batch.drop_columns([each for each in CLOCKS if each in batch.schema.names]) for batch in batches]
    return [*rows, *(file.name if file.name.startswith("latents/") else file for file in files)]


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "name"), DIVISIBLE)
def test_units_of_shipped_files_need_nothing_else(pipeline: Pipeline, name: str, finished, tmp_path: Path) -> None:  # noqa: F811
    folder = without(finished(pipeline), tmp_path / "project", name)
    weights = tmp_path / "weights"
    if pipeline.families:
        shutil.copytree(Project(folder).config.project.weights, weights)
        text = (folder / "project.toml").read_text()
        (folder / "project.toml").write_text(text.replace(str(Project(folder).config.project.weights), "../weights"))
    project = Project(folder)
    stage, inputs, store = project.stage(name), project.inputs(name), Store()
    run = project.open(stage.name)
    run.output.pending = stage.wants(run)
    units = list(divide(project.pipeline.stages[name], stage, run, inputs, ROWS))
    expected = [plain(list(perform(unit))) for unit in units]
    lasting = Packer(store.put).pack(lasting_files(stage, project.pipeline.resources, [i.folder for i in inputs.values()], run))
    packer, own = Packer(store.put), []
    for unit in units:
        run.output.pending = unit.pending
        own.append(packer.pack(stage.opens(run)) if stage.opens else [])
    for hidden in (folder, weights):
        shutil.rmtree(hidden, ignore_errors=True)
    mirror, found = Mirror(tmp_path / "worker"), []
    for unit, files in zip(units, own, strict=True):
        mirror.unpack([*lasting, *files], store.get)
        found.append(plain(list(perform(mirror.unit(unit)))))
    assert found == expected and sum(map(len, found)) > 0
    mirror.remove()
    assert not mirror.folder.exists()


def test_a_file_of_two_units_is_read_once_and_removed_when_no_unit_needs_it(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name * 5)
    store, mirror = Store(), Mirror(tmp_path / "worker")
    packer = Packer(store.put)
    for names, packed in (("ab", 2), ("bc", 3), ("a", 4)):
        files = packer.pack([*(tmp_path / name for name in names), tmp_path / "missing"])
        assert len(store.held) == packed
        mirror.unpack(files, store.get)
        present = [path for path in mirror.folder.rglob("*") if path.is_file()]
        assert sorted(path.read_text() for path in present) == [name * 5 for name in names]
    (tmp_path / "a").write_text("changed")
    mirror.unpack(packer.pack([tmp_path / "a"]), store.get)
    assert mirror.place(tmp_path / "a").read_text() == "changed"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="folder cannot be read for the workers: Is a directory"):
        Packer(Store().put).pack([tmp_path / "folder"])


def test_only_settings_that_are_declared_as_paths_become_paths_of_the_worker(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path)
    folders = (FolderConfig(path="/data/cats", trigger="/imagine"), FolderConfig(path="dogs"))
    moved = mirror.settings(ImagesConfig(folder=folders))
    assert moved.folder == (FolderConfig(path=f"{tmp_path}/data/cats", trigger="/imagine"), folders[1])
    samples = mirror.settings(SamplesConfig(references=("/data/a.png", "b.png")))
    assert samples.references == (f"{tmp_path}/data/a.png", "b.png")
    captions = CaptionsConfig(template="/imagine {caption}")
    assert mirror.settings(captions) == captions


@pytest.mark.parametrize("pipeline", [stages.pipeline(name) for name in stages.PIPELINES], ids=lambda each: each.name)
def test_every_setting_that_a_stage_joins_with_a_folder_is_declared_as_a_path(pipeline: Pipeline) -> None:
    # Those whose description says so, though they are no paths.
    texts = {"images.references", "captions.extension", "descriptions.extension", "sources.exclude", "captions.caption_column"}
    for name in pipeline.stages:
        for field in dataclasses.fields(pipeline.stage(name).config):
            about, key = field.metadata.get("doc", ""), f"{name}.{field.name}"
            if "str" in str(field.type) and key not in texts and any(word in about for word in ("folder", "file", "relative")):
                assert field.metadata["path"], key


@pytest.mark.parametrize("pipeline", [stages.pipeline(name) for name in stages.PIPELINES], ids=lambda each: each.name)
def test_a_divisible_stage_with_files_of_the_user_says_which_it_opens_or_that_they_cannot_be_sent(pipeline: Pipeline) -> None:
    for name in pipeline.stages:
        stage = pipeline.stage(name)
        paths = [field.name for field in dataclasses.fields(stage.config) if field.metadata.get("path")]
        if stage.divisible and (paths or any(isinstance(pipeline.resources[need], Folder) for need in stage.needs)):
            assert stage.opens or not stage.ships, name
