"""Small projects for tests of the whole pipeline: real image files, tiny weights, every stage run by the runner."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from pipeline import cli, runner
from pipeline.commands.init import new_project
from pipeline.commands.plan import make_plan
from pipeline.project.config import Overrides
from pipeline.project.edit import edited
from pipeline.project.outlook import Need, needs, outlook
from pipeline.project.project import Project
from pipeline.runner import Outcome
from pipeline.terminal import Quiet
from tests.harness import compared

ROOT = Path(__file__).parents[1]
HANG = 3000  # seconds until a process counts as hanging, on a busy machine too
MATERIAL = ROOT / "tests" / "material"  # a project of real pictures: photographs, clip art, engravings, emoji
CONFIG = """
[project]
family = "{family}"
weights = "{weights}"
commit_seconds = 0.0

[captions]
preview_prompts = ["a red thing"]

[buckets]
resolutions = [64, 96]

[embeddings]
precision = "float32"

[train]
precision = "float32"
steps = 6
rank = 2
checkpoint_every = 2
caption_dropout = 0.2

[samples]
checkpoints = "all"
precision = "float32"
width = 64
height = 64
steps = 2
"""
TIMED = ("rows.arrow", "state.json")  # of a checkpoint: the time of each step, and the digest of these rows
SIZES = ((160, 120), (120, 160), (128, 128), (200, 90), (150, 150))


class Silent(Quiet):
    """A console that keeps the messages in `lines` and the facts beside the progress in `notes`, and checks the progress."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.notes: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def progress(self, done: int, total: int, unit: str) -> None:
        assert 0 <= done <= total and unit


def draw(path: Path, seed: int, size: tuple[int, int]) -> None:
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (6, 6, 3), dtype=np.uint8), "RGB")
    coarse.resize(size, Image.Resampling.BICUBIC).save(path)


def make(folder: Path, weights: Path, images: int = 4, family: str = "tiny") -> Path:
    """`weights`: the folder of the family's weights."""
    (folder / "images").mkdir(parents=True)
    for number in range(images):
        add_image(folder, f"picture{number}.png", seed=number, size=SIZES[number % len(SIZES)])
    (folder / "project.toml").write_text(CONFIG.format(weights=weights, family=family))
    return folder


# The prompts of a slider, without [train.slider]: they are drawn, and the pictures are trained on.
PROMPTS = """[captions.slider]
positive = "{caption}, old"
negative = "{caption}, young"
neutral = ["a man", "a cat"]

[drawings]
precision = "float32"
width = 64
height = 64
steps = 2
seeds = [0, 1]

"""
SLIDER = {"preset": "slider", "positive": "{caption}, old", "negative": "{caption}, young", "neutral": "a man; a cat"}


def make_slider(folder: Path, weights: Path) -> Path:
    """A project that trains a slider, small enough for a test; it has no images."""
    new_project(folder, {**SLIDER, "family": "tiny", "weights": str(weights)})
    small = {"embeddings.precision": "float32", "train.precision": "float32", "train.steps": 2, "train.lr": 0.1}
    small |= {"train.checkpoint_every": 2, "drawings.seeds": [0]}
    drawn = {"precision": "float32", "width": 64, "height": 64, "steps": 2}
    small |= {f"{section}.{key}": value for section in ("drawings", "samples") for key, value in drawn.items()}
    file = folder / "project.toml"
    file.write_text(edited(file.read_text(), small))
    return folder


def copied(source: Path, folder: Path) -> Path:
    folder.mkdir(parents=True)
    shutil.copy(source / "project.toml", folder)
    shutil.copytree(source / "images", folder / "images")
    return folder


def duplicate(built: Path, folder: Path) -> Path:
    """A copy with its tables, which counts as built: copied files have other inodes, so images runs once more."""
    shutil.copytree(built, folder, copy_function=shutil.copy2, symlinks=True)
    build(folder, "images")
    return folder


def without(source: Path, folder: Path, name: str) -> Path:
    """A copy of a finished project in which the table `name` was never built. The user's files are linked, but for code."""

    def copy(each: str, to: str) -> None:
        first, *inside = Path(each).relative_to(source).parts
        # A link to source code would count as an edit of the finished project's: it has the same time of change.
        (os.link if inside and first not in ("tables", "code") else shutil.copy2)(each, to)

    shutil.copytree(source, folder, copy_function=copy, symlinks=True)
    shutil.rmtree(folder / "tables" / name)
    return folder


def add_image(folder: Path, name: str, seed: int, size: tuple[int, int] = (128, 96), caption: str = "") -> None:
    path = folder / "images" / name
    draw(path, seed, size)
    path.with_suffix(".txt").write_text(caption or f"picture number {seed}")


def edit(folder: Path, old: str, new: str) -> None:
    file = folder / "project.toml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def build(folder: Path, *stage_names: str, console: Silent | None = None) -> dict[str, Outcome]:
    """In this process, in the given order or all in that of the chain."""
    outcomes = {}
    for stage_name in stage_names or Project(folder).stage_names:
        outcomes[stage_name] = runner.run(Project(folder, fetch=True), stage_name, console or Silent())
    return outcomes


def written(outcomes: dict[str, Outcome]) -> dict[str, int]:
    return {stage_name: outcome.written for stage_name, outcome in outcomes.items()}


def report(project: Project, budget: int | None = None, verbose: bool = False) -> tuple[list[str], bool]:
    found = make_plan(project, budget)
    return list(found.lines(verbose)), found.ready


def planned(project: Project) -> dict[str, Need]:
    return {each.stage_name: each for each in needs(project, outlook(project))}


def content(folder: Path, stage_name: str, overrides: Overrides = ()) -> pa.Table:
    """For comparison: rows sorted by key, columns in which equal runs agree, and the bytes of the tensors."""
    found = Project(folder, overrides).current(stage_name)
    rows = found.rows().sort_by([(name, "ascending") for name in found.schema.key])
    table = rows.select(compared(found.schema))
    if not found.schema.tensors:
        return table
    reader, keys = found.tensors(), rows[found.schema.key[0]].to_pylist()
    for tensor in found.schema.tensors:
        sizes = rows[tensor.nbytes].to_pylist()
        values = [reader.read(key, tensor.name).tobytes() if size else b"" for key, size in zip(keys, sizes, strict=True)]
        table = table.append_column(f"bytes of {tensor.name}", pa.array(values, pa.large_binary()))
    return table


def artifacts(folder: Path, stage_name: str) -> dict[str, bytes]:
    """The bytes of a stage's artifacts by name; none where they hold clock times, nor of a full-text index."""
    root = Project(folder).current(stage_name).folder / "artifacts"
    files = {str(path.relative_to(root)): path for path in sorted(root.rglob("*")) if path.is_file()}
    return {name: b"" if path.name in TIMED else path.read_bytes() for name, path in files.items() if ".lance/" not in name}


def command(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "pipeline", *arguments, "--project", str(folder)]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until the condition holds or the process has ended; AssertionError after HANG seconds."""
    began = time.monotonic()
    while not condition() and process.poll() is None:
        assert time.monotonic() - began < HANG, "the process hangs"
        time.sleep(0.05)


def latentmill(folder: Path, *arguments: str, code: int = 0) -> str:
    """In this process, with its chain: standard output and error. A bug is an exception, whose traceback `cli.main` prints."""
    found, out, err = said(*arguments, "--project", str(folder))
    assert found == code, f"{arguments}: {found}\n{out}\n{err}"
    return out + err


def said(*arguments: str) -> tuple[int, str, str]:
    """(exit code, output, errors), as of `pipeline.cli.main`, in this process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        for module in ("pipeline.commands.run", "pipeline.commands.text_to_image.training"):
            patch.setattr(f"{module}.run_apart", _here)
        code = cli.exit_code(lambda: cli.cli.main(list(arguments), prog_name="latentmill", standalone_mode=False))
    texts = [each.buffer.getvalue().decode() for each in (out, err) if isinstance(each.buffer, io.BytesIO)]
    return code, texts[0], texts[1]


def _here(words: list[str], *, quiet: bool = False) -> int:
    code, out, err = said(*words[words.index("run") :])
    (sys.stderr if quiet else sys.stdout).write(out)
    sys.stderr.write(err)
    return code


def latentmill_process(folder: Path, *arguments: str, code: int = 0) -> str:
    """In a new process: standard output and error, without a traceback."""
    process = command(folder, *arguments)
    out, err = process.communicate(timeout=HANG)
    assert process.returncode == code, f"{arguments}: {process.returncode}\n{out}\n{err}"
    assert "Traceback" not in err, err
    return out + err


def in_terminal(
    words: list[str],
    columns: int,
    environment: Mapping[str, str] = os.environ,
    begun: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
) -> tuple[int, str]:
    """Run a program whose output is a terminal of so many columns: (its exit code, what it shows)."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(words, stdout=its, stderr=subprocess.DEVNULL, env=environment, cwd=ROOT, start_new_session=True)
    begun(process)
    os.close(its)
    shown = b""
    with contextlib.suppress(OSError):  # the terminal's end
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    return process.wait(HANG), shown.decode(errors="replace").replace("\r\n", "\n")
