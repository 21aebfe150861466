"""`latentmill queue`: jobs of a project, run one after another by processes of their own."""

from __future__ import annotations

import click

from pipeline.options import NAMES, with_project
from pipeline.project.project import Project
from pipeline.queue import Queue
from pipeline.terminal import format_table, tell


class Group(click.Group):
    """--project may stand behind the subcommand too, as it does in other commands."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for place, word in enumerate(args):
            if word in NAMES or word.startswith(f"{NAMES[0]}="):
                end = place + (2 if word in NAMES else 1)
                args = [*args[place:end], *args[:place], *args[end:]]
                break
        return super().parse_args(ctx, args)


@click.group("queue", cls=Group, invoke_without_command=True)
@with_project
@click.pass_context
def command(context: click.Context, project: Project) -> None:
    """List the jobs of a project, and add, move, stop or cancel them. One job at a time uses the device, also if several projects
    have a queue. Jobs go on when the terminal is closed.
    """
    context.obj = Queue(project.path)
    if context.invoked_subcommand is None:
        tell(listing(context.obj))


def listing(queue: Queue) -> str:
    jobs = queue.jobs()
    rows = []
    for job in jobs:
        told = queue.progress(job.number) if job.state == "running" else {}
        how = f"{told['stage']}: {told['done']} of {told['total']} {told['unit'].removesuffix('s')}s" if told else job.said
        rows.append((job.number, job.state, " ".join(job.words), how))
    table = format_table(("job", "state", "command", "last line"), rows)
    lines = [table if rows else "no job; add one: latentmill queue add train"]
    if queue.paused:
        lines.append("paused: `latentmill queue start` goes on")
    elif any(job.state == "interrupted" for job in jobs):
        lines.append("interrupted, with what was saved: `latentmill queue start` goes on")
    return "\n".join(lines)


@command.command("add", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("words", nargs=-1, required=True, metavar="COMMAND [OPTIONS]...", type=click.UNPROCESSED)
@click.pass_obj
def add(queue: Queue, words: tuple[str, ...]) -> None:
    """Append a command, such as `train --set train.steps=500`, and begin if nothing runs."""
    root = click.get_current_context().find_root()
    if isinstance(root.command, click.Group) and root.command.get_command(root, words[0]) is None:
        raise ValueError(f"there is no command {words[0]!r}")
    job = queue.add(words)
    tell(f"job {job.number}: {' '.join(job.words)}")


@command.command("cancel")
@click.argument("job", type=int)
@click.pass_obj
def cancel(queue: Queue, job: int) -> None:
    """Take a waiting job out of the queue, or stop the running one. It keeps what it has done."""
    queue.cancel(job)


@command.command("move")
@click.argument("job", type=int)
@click.argument("place", type=click.IntRange(1))
@click.pass_obj
def move(queue: Queue, job: int, place: int) -> None:
    """Give a waiting job the place PLACE, from 1, among those that wait."""
    queue.move(job, place - 1)


@command.command("pause")
@click.pass_obj
def pause(queue: Queue) -> None:
    """Begin no further job. The one that runs goes on."""
    queue.pause()


@command.command("start")
@click.pass_obj
def start(queue: Queue) -> None:
    """Go on after `pause`, or after the machine was off: the interrupted job continues where it was."""
    queue.pause(False)


@command.command("log")
@click.argument("job", type=int)
@click.pass_obj
def log(queue: Queue, job: int) -> None:
    """Print what a job has said."""
    tell(queue.log(job).removesuffix("\n"))
