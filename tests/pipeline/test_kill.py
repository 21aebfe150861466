"""Every stage is killed at random moments; in the end its table equals that of an unbroken run."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from pipeline.project import Project
from tests import projects

NOUNS = ("images", "captions", "buckets", "latents", "embeddings", "train", "samples")
KILLS = int(os.environ.get("LATENTMILL_KILLS", "2"))  # per stage; `LATENTMILL_KILLS=20` for the long form


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, tiny_weights) -> tuple[Path, dict[str, float]]:
    """A finished project, and how long each stage took as a process of its own."""
    folder = projects.make(tmp_path_factory.mktemp("unbroken") / "project", tiny_weights, images=5)
    seconds = {}
    for noun in NOUNS:
        began = time.monotonic()
        projects.latentmill(folder, "run", noun)
        seconds[noun] = time.monotonic() - began
    return folder, seconds


@pytest.mark.parametrize("noun", NOUNS)
def test_a_stage_killed_at_random_ends_where_an_unbroken_run_ends(noun, unbroken, tmp_path):
    reference, seconds = unbroken
    folder = tmp_path / "project"
    shutil.copytree(reference, folder, copy_function=shutil.copy2)
    projects.build(folder, "images")
    shutil.rmtree(folder / "tables" / noun)
    generator = random.Random(noun)
    landed, within = 0, seconds[noun]
    while landed < KILLS:
        process = projects.command(folder, "run", noun)
        time.sleep(generator.uniform(0.2, 1.0) * within)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode == -signal.SIGKILL:
            landed += 1
        else:  # it was done before the kill: aim earlier
            within *= 0.9
        if Project.open(folder).current(noun).exists:  # nothing is left to kill: begin again
            shutil.rmtree(folder / "tables" / noun)
    projects.latentmill(folder, "run", noun)
    columns = [c for c in projects.content(folder, noun).column_names if c != "inode"]  # a copy of the project has new inodes
    assert projects.content(folder, noun).select(columns) == projects.content(reference, noun).select(columns)
    assert artifacts(folder, noun) == artifacts(reference, noun)
    assert not list((folder / "tables" / noun).rglob(".tmp-*"))


def artifacts(folder: Path, noun: str) -> dict[str, bytes]:
    """The files that the rows name. A checkpoint's copy of its rows holds clocks, so of that only the name must agree."""
    root = Project.open(folder).current(noun).folder / "artifacts"
    files = [p for p in sorted(root.rglob("*")) if p.is_file()]
    return {str(p.relative_to(root)): p.read_bytes() if p.suffix in (".safetensors", ".png") else b"" for p in files}
