"""Every stage is killed at random moments; in the end its table equals that of an unbroken run."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from pipeline.project.project import Project
from tests import projects

STAGE_NAMES = ("images", "captions", "buckets", "latents", "embeddings", "train", "samples")
KILLS = int(os.environ.get("LATENTMILL_KILLS", "2"))  # per stage; `LATENTMILL_KILLS=20` for the long form


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, tiny_weights) -> tuple[Path, dict[str, float]]:
    """A finished project, and how long each stage took as a process of its own."""
    folder = projects.make(tmp_path_factory.mktemp("unbroken") / "project", tiny_weights, images=5)
    seconds = {}
    for stage_name in STAGE_NAMES:
        began = time.monotonic()
        projects.latentmill(folder, "run", stage_name)
        seconds[stage_name] = time.monotonic() - began
    return folder, seconds


@pytest.mark.parametrize("stage_name", STAGE_NAMES)
def test_a_stage_killed_at_random_ends_where_an_unbroken_run_ends(stage_name, unbroken, tmp_path):
    reference, seconds = unbroken
    folder = tmp_path / "project"
    shutil.copytree(reference, folder, copy_function=shutil.copy2)
    projects.build(folder, "images")
    shutil.rmtree(folder / "tables" / stage_name)
    generator = random.Random(stage_name)
    landed, within = 0, seconds[stage_name]
    while landed < KILLS:
        process = projects.command(folder, "run", stage_name)
        time.sleep(generator.uniform(0.2, 1.0) * within)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode == -signal.SIGKILL:
            landed += 1
        else:  # it was done before the kill: aim earlier
            within *= 0.9
        if Project(folder).current(stage_name).exists:  # nothing is left to kill: begin again
            shutil.rmtree(folder / "tables" / stage_name)
    projects.latentmill(folder, "run", stage_name)
    columns = [
        c for c in projects.content(folder, stage_name).column_names if c != "inode"
    ]  # a copy of the project has new inodes
    assert projects.content(folder, stage_name).select(columns) == projects.content(reference, stage_name).select(columns)
    assert artifacts(folder, stage_name) == artifacts(reference, stage_name)
    assert not list((folder / "tables" / stage_name).rglob(".tmp-*"))


def artifacts(folder: Path, stage_name: str) -> dict[str, bytes]:
    """The files that the rows name. A checkpoint's copy of its rows holds clocks, so of that only the name must agree."""
    root = Project(folder).current(stage_name).folder / "artifacts"
    files = [p for p in sorted(root.rglob("*")) if p.is_file()]
    return {str(p.relative_to(root)): p.read_bytes() if p.suffix in (".safetensors", ".png") else b"" for p in files}
