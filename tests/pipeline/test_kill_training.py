"""Training with every feature on, as a process that is killed, through the runner: in the end nothing shows it."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

from PIL import Image

from pipeline.commands.status import state
from pipeline.project.project import Project
from tests import projects
from tests.pipeline.test_kill import artifacts

KILLS = int(os.environ.get("LATENTMILL_KILLS", "2"))
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
    """A project with everything on, ready to train. Two of its four images have a mask, their right side."""
    projects.make(folder, weights, images=4)
    for path in sorted((folder / "images").glob("*.png"))[:2]:
        image = Image.open(path)
        alpha = Image.linear_gradient("L").rotate(90).resize(image.size)
        image.putalpha(alpha)
        image.save(path)
    words = 'preview_prompts = ["a red thing"]\ntrigger = "sks cup"\nclass_word = "cup"\ntemplate = "{trigger}, {caption}"'
    projects.edit(folder, 'preview_prompts = ["a red thing"]', words)
    projects.edit(folder, "\n[train]\n", '\n[latents]\nmask = "alpha"\n\n[train]\n')
    projects.edit(folder, "steps = 6", "steps = 12")
    projects.edit(folder, "\n[samples]\n", FEATURES)
    projects.build(folder, "images", "captions", "buckets", "latents", "embeddings")
    return folder


def missing(folder: Path) -> int:
    """Rows of `train` that were never committed."""
    return state(Project(folder), "train").missing or 0


def kill(folder: Path, stage_name: str, after: float) -> bool:
    """Run a stage and kill it after so many seconds; whether that ended it."""
    process = projects.command(folder, "run", stage_name)
    time.sleep(after)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


def test_training_with_every_feature_on_and_killed_at_random_ends_where_an_unbroken_run_ends(tmp_path, tiny_weights):
    unbroken, killed = (prepared(tmp_path / name / "project", tiny_weights) for name in ("unbroken", "killed"))
    began = time.monotonic()
    projects.latentmill(unbroken, "run", "train")
    seconds = time.monotonic() - began
    projects.latentmill(killed, "run", "train", "--set", "train.stop_after_steps=4")
    projects.latentmill(killed, "run", "samples")  # previews of what there is, between the kills of what comes after
    generator = random.Random(7)
    landed, within, left = 0, seconds, missing(killed)
    while landed < KILLS:
        dead = kill(killed, "train", generator.uniform(0.5, 0.95) * within)
        before, left = left, missing(killed)
        if not left:  # it was done before the kill: begin again, and aim earlier
            shutil.rmtree(Project(killed).current("train").folder)
            within, left = within * 0.9, missing(killed)
        elif dead and left < before:
            landed += 1
        else:  # before the first step: aim later
            within *= 1.1
    projects.latentmill(killed, "run", "train")
    assert missing(killed) == 0
    projects.latentmill(unbroken, "run", "samples")
    projects.latentmill(killed, "run", "samples")
    for stage_name in ("train", "samples"):
        assert projects.content(killed, stage_name) == projects.content(unbroken, stage_name)
        assert artifacts(killed, stage_name) == artifacts(unbroken, stage_name)
    assert "to the bit" in projects.latentmill(killed, "replay", "12")
