"""The runs of the experiments: one project in a work folder, and what each run sets otherwise.

The 24 pictures of data/example are parted: 18 are trained on, 6 are held out, and with them, at 128 px, the real pictures of
the subjects that the previews do not ask for. All runs share the tables before `train`.
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

from pipeline import runner
from pipeline.project.project import Project

LOG = logging.getLogger("experiments")
EXAMPLE = Path(__file__).parents[1] / "example"
HELD = ("avocado", "fire-truck", "guitar", "mushroom", "octopus", "turtle")  # of the example's pictures, all above 192 px
MORE = 6  # real pictures held out beside them
SUBJECTS = (  # of the previews: their real pictures are in data/example/references
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
EVERYTHING = ("train.data.resolutions={128=1, 192=1}",)  # to measure held-out crops of both sizes


class Told:
    """A console: lines into the log, no bar."""

    def say(self, line: str) -> None:
        """One line."""
        LOG.info("  %s", line)

    def progress(self, done: int, total: int, unit: str) -> None:
        """Nothing."""


def settings(run: str) -> dict[str, Any]:
    """What a run sets otherwise than the project file, as values by their names."""
    pairs = (text.partition("=") for text in RUNS[run])
    return {name: tomllib.loads(f"v = {value}")["v"] if value[0] in "{0123456789" else value for name, _, value in pairs}


def prompts(kind: str) -> list[str]:
    """Previews' prompts: with the trigger, with the class word, with neither, the empty one; of all subjects with the trigger."""
    subjects = captions(EXAMPLE / "references").values() if kind == "all" else SUBJECTS
    words = {"trigger": f"{TRIGGER}, ", "all": f"{TRIGGER}, ", "class": f"{CLASS}, ", "none": ""}
    return [""] if kind == "empty" else [words[kind] + subject for subject in subjects]


def subject_of(prompt: str) -> str:
    """What a preview is to show."""
    return prompt.removeprefix(f"{TRIGGER}, ").removeprefix(f"{CLASS}, ")


def make(folder: Path) -> Path:
    """The project: its file, the pictures trained on and those held out, with their captions."""
    held = folder / "images" / "held"
    held.mkdir(parents=True, exist_ok=True)
    (folder / "project.toml").write_text(PROJECT)
    texts = captions(EXAMPLE / "images")
    apart = {f"{name}.webp" for name in HELD}
    real = {name: text for name, text in captions(EXAMPLE / "references").items() if text not in SUBJECTS}
    _copy(EXAMPLE / "images", folder / "images", {name: text for name, text in texts.items() if name not in apart})
    own = {name: texts[name] for name in sorted(apart)}
    more = dict(sorted(real.items())[:MORE])
    _copy(EXAMPLE / "images", held, own)
    _copy(EXAMPLE / "references", held, more)
    tell(held, own | more)
    return folder


def fingerprint() -> str:
    """Of the pictures and their captions: results are of these."""
    files = (path for part in ("images", "references") for path in sorted((EXAMPLE / part).iterdir()))
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()


def captions(folder: Path) -> dict[str, str]:
    """The captions of a folder, by file name."""
    rows = (json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines())
    return {row["file_name"]: row["text"] for row in rows}


def _copy(source: Path, folder: Path, texts: dict[str, str]) -> None:
    """These pictures, and their captions beside them."""
    for name in texts:
        shutil.copyfile(source / name, folder / name)
    tell(folder, texts)


def tell(folder: Path, texts: dict[str, str]) -> None:
    """A folder's captions."""
    lines = (json.dumps({"file_name": name, "text": text}) for name, text in texts.items())
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")


def build(folder: Path, changes: Iterable[str], stage_names: Sequence[str]) -> Project:
    """Bring these tables up to date under these settings; the project that holds them."""
    changes = tuple(changes)
    for stage_name in stage_names:
        outcome = runner.run(Project(folder, changes, fetch=True), stage_name, Told())
        if outcome.written:
            LOG.info("%s: %d rows in %.0f s", stage_name, outcome.written, outcome.seconds)
    return Project(folder, changes)


def train(folder: Path, run: str) -> Project:
    """A run, and all before it."""
    LOG.info("run %s", run)
    return build(folder, RUNS[run], (*BEFORE, "train"))
