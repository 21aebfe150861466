"""`latentmill segments`: trains in parts with previews between them. `latentmill replay`: computes one step again."""

from __future__ import annotations

from collections.abc import Mapping

import click

from pipeline.commands.run import bring_up_to_date
from pipeline.commands.runs import best_of, checkpoint_scores
from pipeline.commands.status import state
from pipeline.notify import notifying
from pipeline.options import with_project
from pipeline.process import run_apart
from pipeline.project.project import Project
from pipeline.project.runs import find_runs
from pipeline.runner import run_words
from pipeline.terminal import Terminal, tell
from stages.run import Report


@click.command("segments")
@click.option("--every", type=click.IntRange(1), default=250, show_default=True, help="Training steps between two previews.")
@click.option(
    "--patience", type=click.IntRange(1), help="Score the previews, and end after so many segments without a better score."
)
@with_project
def segments_command(every: int, patience: int | None, project: Project) -> None:
    """Train in segments and draw previews after each one. Every segment is a process of its own. The stages before come
    first. The exit code is 0, or that of the first stage that fails.
    """
    with notifying(project.name, "segments"):
        bring_up_to_date(project, project.chain("train"))
        if code := segments(project, every, patience):
            raise click.exceptions.Exit(code)


def segments(project: Project, every: int, patience: int | None) -> int:
    stages = [("train", ["--set", f"train.stop_after_steps={every}"]), ("samples", []), *([("scores", [])] if patience else [])]
    scores: dict[int, float] = {}
    while True:
        for stage, more in stages:
            # A process of its own: while previews are drawn, no training process holds memory. macOS may end long GPU work while
            # the display is on, which short segments avoid.
            if code := run_apart([*run_words(project, stage, "--only"), *more]):
                return code
        project.refresh()
        if not state(project, "train").missing:
            return 0
        if patience:
            scores |= next((checkpoint_scores(project, found) for found in find_runs(project) if found.current), {})
            if since_best(scores) >= patience:
                best = best_of(scores)
                tell(f"ended: {patience} segments had no better score than step {best}; export it with --step {best}")
                return 0


def since_best(scores: Mapping[int, float]) -> int:
    return sum(step > best_of(scores) for step in scores) if scores else 0


@click.command("replay")
@click.argument("step", type=int)
@with_project
def replay_command(step: int, project: Project) -> None:
    """Compute one training step again, and print its losses beside those of the table `train`. STEP is the number of
    the step, counted from 1.
    """
    from stages.text_to_image.train.task import ImageTask
    from stages.tuner.replay import replay_step

    stage = project.stage("train")
    table = project.built(stage.writes, "replay")
    with Terminal("replay") as terminal:
        report = Report(progress=terminal.progress)
        run = project.open("train", report, artifacts=table.folder / "artifacts", stored=table.rows())
        replayed = replay_step(run, ImageTask(run), step)
    for one in replayed:
        logged = "not logged" if one.logged is None else f"logged {one.logged:.9g}"
        image, sigma = one.sample.crop.image_id[:12], one.sample.sigma
        tell(f"sample {one.number}: image {image}, sigma {sigma:.4f}, loss {one.loss:.9g}, {logged}")
    same = all(one.loss == one.logged for one in replayed)
    verdict = "the same to the bit" if same else "not the same: another machine, memory plan or version was used"
    tell(f"step {step}: {verdict}")
