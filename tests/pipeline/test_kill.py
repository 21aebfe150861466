"""Every stage is killed again and again; in the end its table equals that of an unbroken run."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.api import Project as ApiProject
from pipeline.commands.clean import clean
from pipeline.commands.status import states
from pipeline.project.project import Project
from tests import projects
from tests.pipeline.killing import KILLED, count_syncs, run_and_kill

STAGE_NAMES = ("images", "captions", "buckets", "latents", "embeddings", "train", "samples")
KILLS = int(os.environ.get("LATENTMILL_KILLS", "2"))  # for each stage in `make test`
CLI = "pipeline.cli"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, tiny_weights) -> tuple[Path, dict[str, int]]:
    """A finished project, and how often each stage called fsync in a process of its own."""
    folder = projects.make(tmp_path_factory.mktemp("unbroken") / "project", tiny_weights, images=5)
    return folder, {name: count_syncs(CLI, "run", name, "--project", str(folder)) for name in STAGE_NAMES}


@pytest.mark.slow
@pytest.mark.proof("a stage that is killed ends where an unbroken run ends")
@pytest.mark.parametrize("stage_name", STAGE_NAMES)
def test_a_stage_killed_before_any_fsync_ends_where_an_unbroken_run_ends(
    stage_name: str, unbroken: tuple[Path, dict[str, int]], tmp_path: Path, cases: Callable[[int, int], int]
):
    reference, syncs = unbroken
    folder = tmp_path / "project"
    shutil.copytree(reference, folder, copy_function=shutil.copy2, symlinks=True)
    projects.build(folder, "images")
    shutil.rmtree(folder / "tables" / stage_name)
    generator, left = random.Random(stage_name), cases(KILLS, 20)
    while left:
        code, _ = run_and_kill(generator.randint(1, syncs[stage_name]), CLI, "run", stage_name, "--project", str(folder))
        left -= code == KILLED
        use_between_kills(folder, generator)
        if Project(folder).current(stage_name).exists:  # nothing is left to kill: begin again
            shutil.rmtree(folder / "tables" / stage_name)
    projects.latentmill(folder, "run", stage_name)
    found, expected = projects.content(folder, stage_name), projects.content(reference, stage_name)
    columns = [name for name in expected.column_names if name != "inode"]  # a copied file has another inode
    assert found.select(columns) == expected.select(columns)
    assert artifacts(folder, stage_name) == artifacts(reference, stage_name)
    assert not list((folder / "tables" / stage_name).rglob(".tmp-*"))


def use_between_kills(folder: Path, generator: random.Random) -> None:
    """Clean, verify or show a project that was killed: none may fail, and none finds damage."""
    use = generator.choice(("clean", "verify", "status"))
    if use == "clean":
        list(clean(Project(folder), runs=False, dry_run=False))
    elif use == "verify":
        assert not ApiProject(folder).verify()
    else:
        states(Project(folder))


def artifacts(folder: Path, stage_name: str) -> dict[str, bytes]:
    """The bytes of a stage's artifacts by name; empty for a checkpoint's copy of its rows, which holds clock times."""
    root = Project(folder).current(stage_name).folder / "artifacts"
    files = [p for p in sorted(root.rglob("*")) if p.is_file()]
    return {str(p.relative_to(root)): p.read_bytes() if p.suffix in (".safetensors", ".png") else b"" for p in files}
