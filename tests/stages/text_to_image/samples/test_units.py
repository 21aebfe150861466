"""Work units of samples and scores: rows computed in a fresh process are those of one process, to the bit."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import runner
from pipeline.project.project import Project
from pipeline.work import divide
from stages.stage import StageContext, WorkUnit
from tests import projects

PERFORM = """
import pickle, sys
from pathlib import Path
from pipeline.work import perform
unit = pickle.loads(Path(sys.argv[1]).read_bytes())
Path(sys.argv[2]).write_bytes(pickle.dumps(list(perform(unit))))
"""


def perform_elsewhere(unit: WorkUnit, folder: Path) -> list[Any]:
    """Compute a pickled work unit in a fresh process. Returns its batches and artifacts."""
    given, computed = folder / "unit.pickle", folder / "computed.pickle"
    given.write_bytes(pickle.dumps(unit))
    subprocess.run([sys.executable, "-c", PERFORM, str(given), str(computed)], cwd=projects.ROOT, check=True, timeout=900)
    return list(pickle.loads(computed.read_bytes()))


def run_in_units(folder: Path, name: str, size: int) -> None:
    """Bring a table up to date by work units of `size` rows in fresh processes."""
    project = Project(folder)
    stage = project.stage(name)

    def compute(ctx: StageContext) -> Iterator[Any]:
        units = list(divide(project.pipeline.stages[name], stage, ctx, project.inputs(name), size))
        assert len(units) == -(-ctx.pending.num_rows // size) > 1
        for unit in units:
            yield from perform_elsewhere(unit, folder)

    runner.run(project, name, projects.Silent(), compute=compute)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> Path:
    folder = projects.make(tmp_path_factory.mktemp("units") / "project", tiny_weights, images=2)
    projects.edit(folder, 'preview_prompts = ["a red thing"]', 'preview_prompts = ["a red thing", "a blue thing"]')
    projects.build(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("samples", 3), ("scores", 5)])
def test_rows_and_artifacts_of_work_units_are_those_of_one_process(finished, tmp_path, name, size):
    folder = tmp_path / "project"
    shutil.copytree(finished, folder, symlinks=True)
    shutil.rmtree(folder / "tables" / name)
    projects.build(folder, "images")  # copied files have other inodes
    run_in_units(folder, name, size)
    assert projects.content(folder, name) == projects.content(finished, name)
    one, other = (Project(path).current(name).folder / "artifacts" for path in (finished, folder))
    names = {path.relative_to(one) for path in one.rglob("*") if path.is_file()}
    assert names == {path.relative_to(other) for path in other.rglob("*") if path.is_file()}
    assert names and all((one / file).read_bytes() == (other / file).read_bytes() for file in names)
