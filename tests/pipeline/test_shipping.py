"""Units whose input files travel as bytes give the rows of units that see the files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.project.project import Project
from pipeline.shipping import Mirror, Packer, lasting_files
from pipeline.work import divide, perform
from stages.pipelines import Pipeline
from stages.stage import Artifact
from tests.pipeline.test_work import DIVISIBLE, ROWS, finished, without  # noqa: F401  a fixture

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
    ctx = project.context(stage)
    ctx.pending = stage.wants(ctx)
    units = list(divide(project.pipeline.stages[name], stage, ctx, inputs, ROWS))
    expected = [plain(list(perform(unit))) for unit in units]
    lasting = Packer(store.put).pack(lasting_files(stage, project.pipeline.resources, [i.folder for i in inputs.values()], ctx))
    packer, own = Packer(store.put), []
    for unit in units:
        ctx.pending = unit.pending
        own.append(packer.pack(stage.opens(ctx)) if stage.opens else [])
    for hidden in (folder, weights):
        shutil.rmtree(hidden, ignore_errors=True)
    mirror, found = Mirror(tmp_path / "worker"), []
    for unit, files in zip(units, own, strict=True):
        mirror.remove_others([*lasting, *files])
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
        mirror.remove_others(files)
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
