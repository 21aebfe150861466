"""Work divided into units that other processes compute gives the table of an ordinary run, bit for bit."""

import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline import runner
from pipeline.project.project import Project
from pipeline.store.table import Writer
from pipeline.work import divide
from stages.pipelines import Pipeline
from stages.run import Run
from stages.stage import Artifact
from stages.text_to_image import PIPELINE
from tests import projects, toy
from tests.projects import without
from tests.toy.project import make as make_toy

ROWS = 2  # in a unit
SMALL = 30_000  # bytes of a pickled unit
PERFORM = """
import pickle, sys
import stages
from pipeline.work import perform
while True:
    results = [list(perform(pickle.loads(unit))) for unit in pickle.load(sys.stdin.buffer)]
    pickle.dump(results, sys.stdout.buffer)
    sys.stdout.buffer.flush()
"""
DIVISIBLE = [
    pytest.param(pipeline, name, id=f"{pipeline.name}-{name}")
    for pipeline in (PIPELINE, toy.PIPELINE)
    for name in pipeline.stages
    if pipeline.stage(name).divisible
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_weights) -> Callable[[Pipeline], Path]:
    """A function that returns a finished project of a pipeline. Tests copy it."""
    made: dict[str, Path] = {}

    def project(pipeline: Pipeline) -> Path:
        if pipeline.name not in made:
            folder = tmp_path_factory.mktemp("finished") / "project"
            if pipeline is toy.PIPELINE:
                make_toy(folder)
            else:
                projects.make(folder, tiny_weights, images=3)
                projects.edit(folder, "[buckets]", projects.PROMPTS + "[buckets]")
                shutil.copy(folder / "images" / "picture1.png", folder / "images" / "copy of picture1.png")
                (folder / "references").mkdir()
                projects.draw(folder / "references" / "one.png", seed=90, size=(96, 96))
            projects.build(folder)
            made[pipeline.name] = folder
        return made[pipeline.name]

    return project


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[subprocess.Popen[bytes]]:
    """A process that performs units."""
    words = [sys.executable, "-c", PERFORM]
    process = subprocess.Popen(words, cwd=projects.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def in_another_process(
    process: subprocess.Popen[bytes], project: Project, name: str, sizes: list[int]
) -> Callable[[Run[Any]], Iterator]:
    """A `compute` for the runner: units of ROWS rows, pickled (their bytes go into `sizes`) and performed in another process."""

    def compute(run: Run[Any]) -> Iterator[pa.RecordBatch | Artifact]:
        units = divide(project.pipeline.stages[name], project.stage(name), run, project.inputs(name), ROWS)
        pickled = [pickle.dumps(unit) for unit in units]
        sizes.extend(map(len, pickled))
        assert process.stdin and process.stdout
        pickle.dump(pickled, process.stdin)
        process.stdin.flush()
        for results in pickle.load(process.stdout):
            yield from results

    return compute


def artifacts(folder: Path, name: str) -> dict[str, bytes]:
    root = Project(folder).current(name).folder / "artifacts"
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "name"), DIVISIBLE)
def test_units_computed_in_another_process_give_the_table_of_an_ordinary_run(pipeline, name, finished, elsewhere, tmp_path):
    ordinary, divided = finished(pipeline), without(finished(pipeline), tmp_path / "project", name)
    project, sizes = Project(divided, fetch=True), list[int]()
    outcome = runner.run(project, name, projects.Silent(), compute=in_another_process(elsewhere, project, name, sizes))
    assert outcome.written >= outcome.rows > 0 and not outcome.left
    assert len(sizes) == -(-outcome.rows // ROWS) > 1 and max(sizes) < SMALL
    clocks = [column for column in ("inode", "mtime_ns") if name == "images"]
    expected, found = (projects.content(folder, name).drop_columns(clocks) for folder in (ordinary, divided))
    assert found == expected
    assert artifacts(divided, name) == artifacts(ordinary, name)
    assert projects.build(divided, name)[name].up_to_date


def test_what_is_stored_already_is_in_no_unit(finished, elsewhere, tmp_path):
    folder = without(finished(toy.PIPELINE), tmp_path / "project", "tokens")
    project, sizes = Project(folder), list[int]()
    ordinary = projects.content(finished(toy.PIPELINE), "tokens")
    stage, table = project.stage("tokens"), project.current("tokens")
    run = project.open(stage.name)
    wanted = stage.wants(run)
    run.output.pending = wanted.slice(0, 3)
    with Writer(table, project.recipe("tokens")) as writer:
        runner.commit(stage.run(run), stage, writer)
        assert writer.rows_written == 3
    runner.run(project, "tokens", projects.Silent(), compute=in_another_process(elsewhere, project, "tokens", sizes))
    assert len(sizes) == -(-(wanted.num_rows - 3) // ROWS)
    assert projects.content(folder, "tokens") == ordinary


# Without Ray

WITHOUT_RAY = """
import sys
sys.modules["ray"] = None  # as if it were not installed
from pipeline import Project
project = Project(sys.argv[1], {"project.workers": sys.argv[2]})
try:
    project.run("lines")
except ValueError as error:
    print(error)
several = ("pipeline.on_ray", "mlx._distributed_utils")
print([name for name in sys.modules if name in several or name.startswith("ray.")])
"""


def lines_without_ray(folder: Path, workers: str) -> list[str]:
    words = [sys.executable, "-c", WITHOUT_RAY, str(folder), workers]
    return subprocess.run(words, cwd=projects.ROOT, capture_output=True, text=True, check=True).stdout.strip().splitlines()


def test_without_the_extra_nothing_of_it_is_imported(tmp_path: Path) -> None:
    assert lines_without_ray(make_toy(tmp_path / "project"), "local") == ["[]"]


def test_workers_on_ray_without_ray_are_refused_in_one_line(tmp_path: Path) -> None:
    line = 'project.workers = "ray" needs Ray; pip install "latentmill[ray]"'
    assert lines_without_ray(make_toy(tmp_path / "project"), "ray") == [line, "[]"]


def test_a_stage_whose_files_cannot_be_sent_is_computed_by_the_starting_process(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    for name in "ab":
        body = "".join(f"    {name}{line} = {line}\n" for line in range(9))
        (tmp_path / "code" / f"{name}.py").write_text(f'def {name}():\n    """Return a number."""\n{body}    return {name}0\n')
    lines = '[project]\npipeline = "retrieval"\nworkers = "ray://nowhere:1"\nworker_inputs = "shipped"\nunit_rows = 1\n'
    (tmp_path / "project.toml").write_text(lines)
    for name in ("sources", "units"):
        said = projects.latentmill(tmp_path, "run", name, "--only")
        assert "computed here, because its input files cannot be sent to workers" in said
    assert sorted(projects.content(tmp_path, "units")["name"].to_pylist()) == ["a", "b"]
