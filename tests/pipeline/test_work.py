"""Work divided into units gives the table of an ordinary run, bit for bit, whether the files of a unit are seen or shipped."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import stages
from pipeline import runner
from pipeline.on_ray import Mirror, Packer, lasting_files
from pipeline.project.project import Project
from pipeline.store.table import Writer
from pipeline.work import Item, divide, perform
from stages.pipelines import Folder, Pipeline
from stages.run import Run
from stages.stage import WorkUnit
from stages.text_to_image import PIPELINE
from stages.text_to_image.captions.stage import CaptionsConfig
from stages.text_to_image.images.folder import FolderConfig
from stages.text_to_image.images.stage import ImagesConfig
from stages.text_to_image.samples.config import SamplesConfig
from tests import projects, toy
from tests.projects import without
from tests.toy.project import make as make_toy

ROWS = 2  # in a unit
SMALL = 30_000  # bytes of a pickled unit
CLOCKS = ("inode", "mtime_ns", "seconds")
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
                projects.edit(folder, "steps = 6\nrank = 2\ncheckpoint_every = 2", "steps = 2\nrank = 2\ncheckpoint_every = 1")
                shutil.copy(folder / "images" / "picture1.png", folder / "images" / "copy of picture1.png")
                (folder / "references").mkdir()
                projects.draw(folder / "references" / "one.png", seed=90, size=(96, 96))
            projects.build(folder)
            made[pipeline.name] = folder
        return made[pipeline.name]

    return project


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Callable[[list[WorkUnit]], list[list[Item]]]]:
    """A function that performs units in another process, to which they go in few bytes."""
    words = [sys.executable, "-c", PERFORM]
    process = subprocess.Popen(words, cwd=projects.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def performed(units: list[WorkUnit]) -> list[list[Item]]:
        pickled = [pickle.dumps(unit) for unit in units]
        assert max(map(len, pickled)) < SMALL and process.stdin and process.stdout
        pickle.dump(pickled, process.stdin)
        process.stdin.flush()
        results: list[list[Item]] = pickle.load(process.stdout)
        return results

    yield performed
    process.kill()
    process.communicate()


def plain(results: list[list[Item]]) -> list:
    """Without what clocks decide: some columns, and the stored latents of `samples`, which say their time."""
    items = [item for each in results for item in each]
    batches = [item for item in items if isinstance(item, pa.RecordBatch)]
    files = [item for item in items if not isinstance(item, pa.RecordBatch)]
    rows = [batch.drop_columns([each for each in CLOCKS if each in batch.schema.names]) for batch in batches]
    return [*rows, *(file.name if file.name.startswith("latents/") else file for file in files)]


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "name"), DIVISIBLE)
def test_units_computed_in_another_process_or_from_shipped_files_alone_give_the_table_of_an_ordinary_run(
    pipeline, name, finished, elsewhere, tmp_path
):
    ordinary, folder, weights = finished(pipeline), without(finished(pipeline), tmp_path / "project", name), tmp_path / "weights"
    if pipeline.families:
        shutil.copytree(Project(folder).config.project.weights, weights)
        projects.edit(folder, str(Project(folder).config.project.weights), "../weights")
    project = Project(folder)
    stage, inputs, packer = project.stage(name), project.inputs(name), Packer(bytes)  # a reference to bytes: they themselves
    units, results, lasting, own = list[WorkUnit](), list[list[Item]](), list[Any](), list[list[Any]]()

    def compute(run: Run[Any]) -> Iterator[Item]:
        units.extend(divide(project.pipeline.stages[name], stage, run, inputs, ROWS))
        needed = lasting_files(stage, project.pipeline.resources, [each.folder for each in inputs.values()], run)
        lasting.extend(Packer(bytes).pack(needed))
        for unit in units:
            of_unit = dataclasses.replace(run, output=dataclasses.replace(run.output, pending=unit.pending))
            own.append(packer.pack(stage.opens(of_unit)) if stage.opens else [])
        results.extend(elsewhere(units))
        for result in results:
            yield from result

    outcome = runner.run(project, name, projects.Silent(), compute=compute)
    assert outcome.written >= outcome.rows > 0 and not outcome.left
    assert len(units) == -(-outcome.rows // ROWS) > 1
    clocks = [column for column in ("inode", "mtime_ns") if name == "images"]
    expected, found = (projects.content(each, name).drop_columns(clocks) for each in (ordinary, folder))
    assert found == expected
    assert projects.artifacts(folder, name) == projects.artifacts(ordinary, name)
    assert projects.build(folder, name)[name].up_to_date
    for hidden in (folder, weights):
        shutil.rmtree(hidden, ignore_errors=True)
    mirror, shipped = Mirror(tmp_path / "worker"), []
    for unit, files in zip(units, own, strict=True):
        mirror.unpack([*lasting, *files], bytes)
        shipped.append(list(perform(mirror.unit(unit))))
    assert plain(shipped) == plain(results) and plain(results)
    mirror.remove()
    assert not mirror.folder.exists()


def test_what_is_stored_already_is_in_no_unit(finished, elsewhere, tmp_path):
    folder = without(finished(toy.PIPELINE), tmp_path / "project", "tokens")
    project, units = Project(folder), list[WorkUnit]()
    stage, table = project.stage("tokens"), project.current("tokens")
    run = project.open(stage.name)
    wanted = stage.wants(run)
    run.output.pending = wanted.slice(0, 3)
    with Writer(table, project.recipe("tokens")) as writer:
        runner.commit(stage.run(run), stage, writer)
        assert writer.rows_written == 3

    def compute(run: Run[Any]) -> Iterator[Item]:
        units.extend(divide(project.pipeline.stages["tokens"], stage, run, project.inputs("tokens"), ROWS))
        for result in elsewhere(units):
            yield from result

    runner.run(project, "tokens", projects.Silent(), compute=compute)
    assert len(units) == -(-(wanted.num_rows - 3) // ROWS)
    assert projects.content(folder, "tokens") == projects.content(finished(toy.PIPELINE), "tokens")


def test_a_file_of_two_units_is_read_once_and_removed_when_no_unit_needs_it(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name * 5)
    held, mirror = list[bytes](), Mirror(tmp_path / "worker")
    packer = Packer(lambda content: held.append(content) or len(held) - 1)
    for names, packed in (("ab", 2), ("bc", 3), ("a", 4)):
        files = packer.pack([*(tmp_path / name for name in names), tmp_path / "missing"])
        assert len(held) == packed
        mirror.unpack(files, held.__getitem__)
        present = [path for path in mirror.folder.rglob("*") if path.is_file()]
        assert sorted(path.read_text() for path in present) == [name * 5 for name in names]
    (tmp_path / "a").write_text("changed")
    mirror.unpack(packer.pack([tmp_path / "a"]), held.__getitem__)
    assert mirror.place(tmp_path / "a").read_text() == "changed"
    with pytest.raises(ValueError, match=f"{tmp_path} cannot be read for the workers: Is a directory"):
        packer.pack([tmp_path])


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
def test_every_setting_of_paths_is_declared_and_a_divisible_stage_says_which_files_of_the_user_it_opens(
    pipeline: Pipeline,
) -> None:
    # Those whose description says so, though they are no paths.
    texts = {"images.references", "captions.extension", "descriptions.extension", "sources.exclude", "captions.caption_column"}
    for name in pipeline.stages:
        stage, fields = pipeline.stage(name), dataclasses.fields(pipeline.stage(name).config)
        for field in fields:
            about, key = field.metadata.get("doc", ""), f"{name}.{field.name}"
            if "str" in str(field.type) and key not in texts and any(word in about for word in ("folder", "file", "relative")):
                assert field.metadata["path"], key
        own = any(isinstance(pipeline.resources[need], Folder) for need in stage.needs)
        if stage.divisible and (own or any(field.metadata.get("path") for field in fields)):
            assert stage.opens or not stage.ships, name  # or they cannot be sent


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


@pytest.mark.parametrize(
    ("workers", "said"), [("local", []), ("ray", ['project.workers = "ray" needs Ray; pip install "latentmill[ray]"'])]
)
def test_without_ray_nothing_of_it_is_imported_and_workers_on_it_are_refused_in_one_line(workers, said, tmp_path):
    words = [sys.executable, "-c", WITHOUT_RAY, str(make_toy(tmp_path / "project")), workers]
    done = subprocess.run(words, cwd=projects.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [*said, "[]"]


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
