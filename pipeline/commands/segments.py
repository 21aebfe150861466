"""`latentmill segments`: train some steps, draw previews, go on, each as a process of its own.

The training process has ended while previews are drawn, so they cost it no memory, and a run in segments ends with the same bits
as an unbroken one. Short segments are also the known remedy where macOS ends long GPU work while the display is on.
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


def run_stage(stage: str, *arguments: str) -> int:
    """Run `latentmill run STAGE ARGUMENTS` as a process on the same terminal. Returns its exit code."""
    return subprocess.run([sys.executable, "-m", "pipeline", "run", stage, *arguments], check=False).returncode


def segments(path: str, every: int, overrides: Iterable[str] = (), run: Callable[..., int] = run_stage) -> int:
    """Alternate `every` steps of training with previews until the run is complete. Returns the first exit code that is not 0.
    `path` is the project's folder, `overrides` are settings as section.key=value; `run` runs one stage, for tests.
    """
    given = ["--project", path, *(word for override in overrides for word in ("--set", override))]
    while True:
        for stage, more in (("train", ["--set", f"train.stop_after_steps={every}"]), ("samples", [])):
            code = run(stage, *given, *more)
            if code:
                return code
        if not state(Project(path, overrides), "train").missing:
            return 0
