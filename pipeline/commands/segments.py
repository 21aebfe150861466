"""Training in segments: so many steps, then previews, and on, each a process of its own.

Previews in the middle of a run cost the training nothing in memory (the process is gone while they are drawn) and nothing
in exactness (a run in segments ends with the same bits as one that never stopped). Short segments are also the known remedy
where macOS ends long GPU work while the display is on.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable

import click

from pipeline.commands.status import state
from pipeline.options import PROJECT, SET, overrides_from_environment
from pipeline.project.project import Project


@click.command("segments")
@click.option(
    "--every", type=click.IntRange(1), default=250, show_default=True, help="Training steps from one preview to the next."
)
@PROJECT
@SET
def command(every: int, path: str, overrides: tuple[str, ...]) -> int:
    """Train in segments, each a process of its own, and draw previews after each."""
    return segments(path, every, overrides or overrides_from_environment())


def spawn(stage: str, *arguments: str) -> int:
    """`latentmill run STAGE ARGUMENTS` as a process with our terminal; its exit code."""
    return subprocess.run([sys.executable, "-m", "pipeline", "run", stage, *arguments], check=False).returncode


def segments(path: str, every: int, overrides: Iterable[str] = (), run: Callable[..., int] = spawn) -> int:
    """Train `every` steps and draw previews, until the run is whole. Returns the first exit code that is not 0, or 0."""
    given = ["--project", path, *(word for override in overrides for word in ("--set", override))]
    while True:
        for stage, more in (("train", ["--set", f"train.stop_after_steps={every}"]), ("samples", [])):
            code = run(stage, *given, *more)
            if code:
                return code
        if not state(Project(path, overrides), "train").missing:
            return 0
