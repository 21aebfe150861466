"""Training with every feature on, as a process that is killed, through the runner: in the end nothing shows it."""

import os
import random
import signal
import time

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

[train.ema]

[samples]
"""


def test_training_with_every_feature_on_and_killed_at_random_ends_where_an_unbroken_run_ends(tmp_path, tiny_weights):
    folders = [projects.make(tmp_path / name / "project", tiny_weights, images=4) for name in ("unbroken", "killed")]
    for folder in folders:
        words = 'preview_prompts = ["a red thing"]\ntrigger = "sks cup"\nclass_word = "cup"\ntemplate = "{trigger}, {caption}"'
        projects.edit(folder, 'preview_prompts = ["a red thing"]', words)
        projects.edit(folder, "steps = 6", "steps = 12")
        projects.edit(folder, "\n[samples]\n", FEATURES)
        projects.build(folder, "images", "captions", "buckets", "latents", "embeddings")
    unbroken, killed = folders
    began = time.monotonic()
    projects.latentmill(unbroken, "run", "train")
    seconds = time.monotonic() - began
    generator = random.Random(7)
    for _ in range(KILLS):
        process = projects.command(killed, "run", "train")
        time.sleep(generator.uniform(0.5, 0.95) * seconds)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    projects.latentmill(killed, "run", "train")
    assert projects.content(killed, "train") == projects.content(unbroken, "train")
    assert artifacts(killed, "train") == artifacts(unbroken, "train")
    assert "to the bit" in projects.latentmill(killed, "replay", "12")
