"""The runs of the experiments: one project in a work folder, and the settings that each run changes.

Of the 24 pictures of data/projects/example, 18 are trained on and 6 are held out. Real pictures of subjects without previews
are held
out too, at 128 px. All runs share the tables before `train`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from data import EXAMPLE
from data.research.experiments.scoring import captions
from pipeline import runner
from pipeline.project.project import Project
from pipeline.terminal import Quiet

LOG = logging.getLogger("experiments")
HELD_OUT = ("avocado", "fire-truck", "guitar", "mushroom", "octopus", "turtle")  # pictures of the example above 192 px
HELD_OUT_REFERENCES = 6  # number of real pictures that are held out too
SUBJECTS = (  # subjects of the previews; their real pictures are in data/projects/example/references
    "a lion on a red background",
    "a butterfly on a yellow background",
    "a watermelon on an orange background",
    "a steam train on a green background",
    "a teddy bear on a blue background",
    "a pineapple on a pink background",
    "a frog on a grey background",
    "a helicopter on a purple background",
    "a pig on an orange background",
    "a castle on a teal background",
)
TRIGGER, CLASS = "ohwx", "icon"
STEPS = 200
BEFORE = ("images", "captions", "buckets", "latents", "embeddings")

PROJECT = f"""
[project]
family = "micro"

[captions]
trigger = "{TRIGGER}"
class_word = "{CLASS}"
template = "{{trigger}}, {{caption}}"

[buckets]
resolutions = [128, 192]

[embeddings]
precision = "float32"

[train]
precision = "float32"
steps = {STEPS}
seed = 0
batch_size = 4
rank = 16
lr = 3e-3
caption_dropout = 0.1
checkpoint_every = {STEPS}

[train.schedule]
shape = "cosine"
warmup_steps = 20
decay_steps = {STEPS - 20}

[train.data]
resolutions = {{128 = 1, 192 = 0}}

[train.validation]
paths = ["held/*"]
every = {STEPS}

[samples]
precision = "float32"
width = 128
height = 128
steps = 16
"""

RUNS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "dropout 0": ("train.caption_dropout=0.0",),
    "dropout 0.5": ("train.caption_dropout=0.5",),
    "two sizes": ("train.data.resolutions={128=1, 192=1}",),
    "preserved": ("train.preservation.weight=1.0",),
    "preserved, dropout 0": ("train.preservation.weight=1.0", "train.caption_dropout=0.0"),
    "noisy": (
        "train.batch_size=1",
        "train.schedule.shape=constant",
        "train.ema.decay=0.99",
        "train.checkpoint_every=10",
    ),
}
BOTH_SIZES = ("train.data.resolutions={128=1, 192=1}",)  # to measure held-out crops of both sizes


class LogConsole(Quiet):
    """A console for the runner that writes messages into the log and shows no progress bar."""

    def say(self, line: str) -> None:
        """Log one line."""
        LOG.info("  %s", line)


def settings(run: str) -> dict[str, Any]:
    """Return the settings that the run named `run` changes: setting name -> value."""
    pairs = (text.partition("=") for text in RUNS[run])
    return {name: tomllib.loads(f"v = {value}")["v"] if value[0] in "{0123456789" else value for name, _, value in pairs}


def prompts(kind: str) -> list[str]:
    """Return the preview prompts of one kind. "trigger", "class" and "none" are the subjects with the trigger, with the
    class word, and with neither. "all" are the subjects of all references, with the trigger. "empty" is the empty prompt.
    """
    subjects = captions(EXAMPLE / "references").values() if kind == "all" else SUBJECTS
    words = {"trigger": f"{TRIGGER}, ", "all": f"{TRIGGER}, ", "class": f"{CLASS}, ", "none": ""}
    return [""] if kind == "empty" else [words[kind] + subject for subject in subjects]


def subject_of(prompt: str) -> str:
    """Return a prompt without its trigger or class word."""
    return prompt.removeprefix(f"{TRIGGER}, ").removeprefix(f"{CLASS}, ")


def make_project(folder: Path) -> Path:
    """Write the project into a folder and return it: project.toml, training pictures and held-out pictures with captions."""
    held = folder / "images" / "held"
    held.mkdir(parents=True, exist_ok=True)
    (folder / "project.toml").write_text(PROJECT)
    texts = captions(EXAMPLE / "images")
    held_out = {f"{name}.webp" for name in HELD_OUT}
    real = {name: text for name, text in captions(EXAMPLE / "references").items() if text not in SUBJECTS}
    _copy(EXAMPLE / "images", folder / "images", {name: text for name, text in texts.items() if name not in held_out})
    own = {name: texts[name] for name in sorted(held_out)}
    more = dict(sorted(real.items())[:HELD_OUT_REFERENCES])
    _copy(EXAMPLE / "images", held, own)
    _copy(EXAMPLE / "references", held, more)
    write_captions(held, own | more)
    return folder


def fingerprint() -> str:
    """Return a sha256 of the example's pictures and captions. It identifies the data that the results were measured on."""
    files = (path for folder in ("images", "references") for path in sorted((EXAMPLE / folder).iterdir()))
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()


def _copy(source: Path, folder: Path, texts: dict[str, str]) -> None:
    """Copy the pictures named in `texts` (file name -> caption) from `source`, and write their captions."""
    for name in texts:
        shutil.copyfile(source / name, folder / name)
    write_captions(folder, texts)


def write_captions(folder: Path, texts: dict[str, str]) -> None:
    """Write metadata.jsonl with the captions of a folder's pictures (file name -> caption)."""
    lines = (json.dumps({"file_name": name, "text": text}) for name, text in texts.items())
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")


def build(folder: Path, changes: Iterable[str], stage_names: Sequence[str]) -> Project:
    """Run the stages `stage_names` of the project in `folder` with changed settings, and return the project. `changes` are
    texts such as "train.rank=8".
    """
    changes = tuple(changes)
    for stage_name in stage_names:
        outcome = runner.run(Project(folder, changes, fetch=True), stage_name, LogConsole())
        if outcome.written:
            LOG.info("%s: %d rows in %.0f s", stage_name, outcome.written, outcome.seconds)
    return Project(folder, changes)


def train(folder: Path, run: str) -> Project:
    """Train a run of RUNS after the stages that it depends on, and return its project."""
    LOG.info("run %s", run)
    return build(folder, RUNS[run], (*BEFORE, "train"))
