"""Training with every feature on, as a process that is killed: its table and artifacts equal those of an unbroken run."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from pipeline.commands.status import state
from pipeline.project.project import Project
from tests import projects
from tests.pipeline.kill_loop import CLI
from tests.pipeline.killing import KILLED, count_syncs, run_and_kill
from tests.pipeline.test_kill import artifacts

FEATURES = """
accumulate = 2
base_bits = 8

[train.optimizer]
kind = "adamw8bit"

[train.loss]
kind = "pseudo_huber"
weight = "bell"

[train.noise]
strata = 4

[train.data]
dropped = "trigger"
resolutions = {64 = 2, 96 = 1}

[train.validation]
every = 4

[train.preservation]
every = 2

[train.mask]
floor = 0.2

[train.ema]

[samples]
"""


def prepared(folder: Path, weights: Path) -> Path:
    """A project with every feature on, ready to train. Two of its four images have a mask: their right side."""
    projects.make(folder, weights, images=4)
    for path in sorted((folder / "images").glob("*.png"))[:2]:
        image = Image.open(path)
        alpha = Image.linear_gradient("L").rotate(90).resize(image.size)
        image.putalpha(alpha)
        image.save(path)
    words = 'preview_prompts = ["a red thing"]\ntrigger = "sks cup"\nclass_word = "cup"\ntemplate = "{trigger}, {caption}"'
    projects.edit(folder, 'preview_prompts = ["a red thing"]', words)
    projects.edit(folder, "\n[train]\n", '\n[latents]\nmask = "alpha"\n\n[train]\n')
    projects.edit(folder, "steps = 6", "steps = 8")
    projects.edit(folder, "\n[samples]\n", FEATURES)
    projects.edit(folder, "width = 64\nheight = 64\nsteps = 2", "width = 32\nheight = 32\nsteps = 1")
    projects.build(folder, "images", "captions", "buckets", "latents", "embeddings")
    return folder


def missing(folder: Path) -> int:
    """Rows of `train` that were never committed."""
    return state(Project(folder), "train").missing or 0


@pytest.mark.slow
@pytest.mark.proof("training with every feature on that is killed ends where an unbroken run ends")
def test_training_with_every_feature_on_and_killed_before_any_fsync_ends_where_an_unbroken_run_ends(
    tmp_path: Path, tiny_weights: Path, cases: Callable[[int, int], int]
):
    unbroken = prepared(tmp_path / "unbroken" / "project", tiny_weights)
    killed = projects.duplicate(unbroken, tmp_path / "killed" / "project")
    syncs = count_syncs(lambda: projects.latentmill(unbroken, "run", "train", "--only"))
    projects.latentmill(killed, "run", "train", "--only", "--set", "train.stop_after_steps=4")
    projects.latentmill(killed, "run", "samples", "--only")  # previews between the kills
    generator, left, rows = random.Random(7), cases(1, 20), missing(killed)
    while left:
        code, _ = run_and_kill(generator.randint(1, syncs), CLI, "run", "train", "--only", "--project", str(killed))
        before, rows = rows, missing(killed)
        left -= code == KILLED and rows < before  # a kill before the first new row tests nothing of training
        if not rows:
            shutil.rmtree(Project(killed).current("train").folder)  # nothing is left to kill: begin again
            rows = missing(killed)
    projects.latentmill(killed, "run", "train", "--only")
    assert missing(killed) == 0
    projects.latentmill(unbroken, "run", "samples", "--only")
    projects.latentmill(killed, "run", "samples", "--only")
    for stage_name in ("train", "samples"):
        assert projects.content(killed, stage_name) == projects.content(unbroken, stage_name)
        assert artifacts(killed, stage_name) == artifacts(unbroken, stage_name)
    assert "to the bit" in projects.latentmill(killed, "replay", "8")
