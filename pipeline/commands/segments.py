"""`latentmill segments`: trains some steps, draws previews, and repeats, without change to the trained bits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping

import click

from pipeline.commands.compare import checkpoint_scores
from pipeline.commands.status import state
from pipeline.options import PROJECT, SET, overrides_from_environment
from pipeline.project.project import Project
from pipeline.project.runs import find_runs


@click.command("segments")
@click.option("--every", type=click.IntRange(1), default=250, show_default=True, help="Training steps between two previews.")
@click.option(
    "--patience", type=click.IntRange(1), help="Score the previews, and end after so many segments without a better score."
)
@PROJECT
@SET
def command(every: int, patience: int | None, path: str, overrides: tuple[str, ...]) -> int:
    """Train in segments and draw previews after each one. Every segment is a process of its own. --every sets the
    training steps of a segment. With --patience, previews are scored too. Training then ends early after so many
    segments without a better score. The exit code is 0, or that of the first stage that fails.
    """
    return segments(path, every, overrides or overrides_from_environment(), patience)


def run_stage(stage: str, *arguments: str) -> int:
    # A process of its own: while previews are drawn, no training process holds memory. macOS may end long GPU work while the
    # display is on, which short segments avoid.
    return subprocess.run([sys.executable, "-m", "pipeline", "run", stage, *arguments], check=False).returncode


def segments(
    path: str,
    every: int,
    overrides: Iterable[str] = (),
    patience: int | None = None,
    run: Callable[..., int] = run_stage,
) -> int:
    """Train `every` steps at a time until the training is complete; return 0, or the exit code of the first stage that fails.

    With `patience`, also score previews, and end after so many segments without a better score.
    """
    given = ["--project", path, *(word for override in overrides for word in ("--set", override))]
    stages = [("train", ["--set", f"train.stop_after_steps={every}"]), ("samples", []), *([("scores", [])] if patience else [])]
    scores: dict[int, float] = {}
    while True:
        for stage, more in stages:
            code = run(stage, *given, *more)
            if code:
                return code
        project = Project(path, overrides)
        if not state(project, "train").missing:
            return 0
        if patience:
            scores |= next((checkpoint_scores(project, found) for found in find_runs(project) if found.current), {})
            if since_best(scores) >= patience:
                best = max(scores, key=lambda step: scores[step])
                click.echo(f"ended: {patience} segments had no better score than step {best}; export it with --step {best}")
                return 0


def since_best(scores: Mapping[int, float]) -> int:
    """How many scored steps come after the best one, the earliest of equal scores."""
    best = max(scores.values(), default=0.0)
    first = min((step for step, score in scores.items() if score == best), default=0)
    return sum(step > first for step in scores)
