"""`latentmill replay`: computes a training step again and compares the losses with the table train."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import click

from pipeline.options import with_project
from pipeline.project.project import Project
from pipeline.terminal import Terminal


@click.command("replay")
@click.argument("step", type=int)
@with_project
def command(step: int, project: Project) -> None:
    """Compute one training step again, and print its losses beside those of the table `train`. STEP is the number of
    the step, counted from 1.
    """
    with Terminal("replay") as terminal:
        lines = list(replay_run(project, step, terminal.progress))
    for line in lines:
        click.echo(line)


def replay_run(project: Project, step: int, progress: Callable[[int, int, str], None]) -> Iterator[str]:
    """New and logged loss of each sample, then whether all agree. Raises ValueError if the run lacks the step."""
    from stages.run import Report
    from stages.text_to_image.train.task import ImageTask
    from stages.tuner.replay import replay_step

    stage = project.stage("train")
    table = project.built(stage.writes, "replay")
    run = project.open("train", Report(progress=progress), artifacts=table.folder / "artifacts", stored=table.rows())
    replayed = replay_step(run, ImageTask(run), step)
    for one in replayed:
        logged = "not logged" if one.logged is None else f"logged {one.logged:.9g}"
        image, sigma = one.sample.crop.image_id[:12], one.sample.sigma
        yield f"sample {one.number}: image {image}, sigma {sigma:.4f}, loss {one.loss:.9g}, {logged}"
    same = all(one.loss == one.logged for one in replayed)
    yield f"step {step}: {'the same to the bit' if same else 'not the same: another machine, memory plan or version was used'}"
