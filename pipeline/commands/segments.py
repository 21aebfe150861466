"""`latentmill segments`: trains some steps, draws previews, and repeats; each part runs in a process of its own.

No training process runs while previews are drawn, so both have all memory. A run in segments ends with the same bits as an
unbroken run. Short segments also help if macOS ends long GPU work while the display is on.
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
@click.option("--every", type=click.IntRange(1), default=250, show_default=True, help="Training steps between two previews.")
@PROJECT
@SET
def command(every: int, path: str, overrides: tuple[str, ...]) -> int:
    """Train in segments and draw previews after each one. Every segment is a process of its own."""
    return segments(path, every, overrides or overrides_from_environment())


def run_stage(stage: str, *arguments: str) -> int:
    """Run the command `latentmill run` for `stage` as a subprocess and return its exit code. Further arguments are
    added to the command line. The subprocess uses the same terminal.
    """
    return subprocess.run([sys.executable, "-m", "pipeline", "run", stage, *arguments], check=False).returncode


def segments(path: str, every: int, overrides: Iterable[str] = (), run: Callable[..., int] = run_stage) -> int:
    """Train `every` steps, draw previews, and repeat until the training run is complete. Return 0, or the exit code of
    the first stage that fails. `path` is the project's folder. `overrides` replace settings; they are texts such as
    "train.steps=500". `run(stage, *arguments)` runs one stage with command-line arguments and returns its exit code.
    """
    given = ["--project", path, *(word for override in overrides for word in ("--set", override))]
    while True:
        for stage, more in (("train", ["--set", f"train.stop_after_steps={every}"]), ("samples", [])):
            code = run(stage, *given, *more)
            if code:
                return code
        if not state(Project(path, overrides), "train").missing:
            return 0
