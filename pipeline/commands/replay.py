"""A training step once more, beside what the table says of it."""

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
    """Compute one step of the training run again, and compare its losses with the table train."""
    with Terminal("replay") as terminal:
        lines = list(replay_run(project, step, terminal.progress))
    for line in lines:
        click.echo(line)


def replay_run(project: Project, step: int, progress: Callable[[int, int, str], None]) -> Iterator[str]:
    """A line per sample of the step: its loss now, and as it was logged."""
    from stages.text_to_image.train.replay import replay

    stage = project.stage("train")
    table = project.built(stage.writes, "replay")
    context = project.context(stage, artifacts=table.folder / "artifacts", stored=table.rows(), progress=progress)
    context.pending = context.stored.slice(0, 0)
    found = replay(context, step)
    for one in found:
        logged = "not logged" if one.logged is None else f"logged {one.logged:.9g}"
        yield f"sample {one.sample}: image {one.image_id[:12]}, sigma {one.sigma:.4f}, loss {one.loss:.9g}, {logged}"
    same = all(one.loss == one.logged for one in found)
    yield f"step {step}: {'the same to the bit' if same else 'not to the bit: another machine, plan or version wrote it'}"
