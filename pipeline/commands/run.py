"""`latentmill run`: runs one stage, which brings its table up to date."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipeline.awake import allow_open_files, kept_awake, replace_process, run_with_restart
from pipeline.options import with_project
from pipeline.ranks import following
from pipeline.store.disk import format_bytes
from pipeline.terminal import Terminal, format_seconds

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.project.project import Project
    from pipeline.runner import Outcome


@click.command("run")
@click.argument("stage")
@click.option(
    "--memory", "measured", is_flag=True, help="Also measure MLX's memory batch by batch, and write the figures to tables/memory."
)
@click.option("--name", "run_name", default="", envvar="LATENTMILL_NAME", help="Name the run, if the stage trains.")
@with_project
def command(stage: str, measured: bool, run_name: str, project: Project) -> None:
    """Run one stage, which brings its table up to date. STAGE is the name of a table in `latentmill status`; `latentmill
    STAGE` is short for it. The tables that the stage reads are used as they are; `make STAGE` brings them up to date
    first. With --memory, MLX's memory is measured too. --name names the run of a stage that trains.
    """
    from pipeline import runner

    project.stage(stage)
    meter = None
    if measured:
        from pipeline.commands.memory import stage_report
        from stages.tuner.blockwise.meter import Meter

        meter = Meter()

    def run() -> Outcome:
        with kept_awake(), Terminal(stage) as terminal:
            return runner.run(project.allow_downloads(), stage, terminal, meter, run_name=run_name)

    allow_open_files()
    outcome = run_with_restart(run, lambda: artifacts(project, stage), lambda line: click.echo(line, err=True), replace_process)
    # Of several ranks, one reports.
    if following():
        return
    click.echo(summary(outcome))
    for line in stage_report(meter, project, stage) if meter else ():
        click.echo(line)
    for line in results(project, stage):
        click.echo(line)


def artifacts(project: Project, stage_name: str) -> Path | None:
    """None if a table that the stage reads is not built yet, or weights are missing."""
    try:
        return project.current(stage_name).folder / "artifacts"
    except ValueError:  # running the stage reports it
        return None


def summary(outcome: Outcome) -> str:
    if outcome.up_to_date:
        return f"{outcome.stage_name}: up to date, {outcome.rows} rows"
    if outcome.left:
        kept = f"{outcome.stage_name}: {outcome.reason}; {outcome.written} new rows are kept, {outcome.left} are still to do"
        return f"{kept}. Run the same command to go on."
    parts = [f"{outcome.written} rows written"]
    parts += [f"{outcome.removed} rows no longer wanted"] if outcome.removed else []
    parts += [f"{outcome.rows} in all", format_seconds(outcome.seconds), f"peak memory {format_bytes(outcome.peak_rss)}"]
    parts += [f"{format_bytes(outcome.peak_mlx)} of it in MLX"] if outcome.peak_mlx else []
    return f"{outcome.stage_name}: {', '.join(parts)}"


def results(project: Project, stage_name: str) -> list[str]:
    """Lines "adapter: PATH" for the result files of the stage and of the tables that it reads."""
    stage = project.stage(stage_name)
    lines = []
    for name in [*(read.name for read in stage.reads), stage_name] if stage.result else []:
        result = project.stage(name).result
        path = project.current(name).folder / "artifacts" / result
        lines += [f"{result.split('.')[0]}: {path}"] if result and path.exists() else []
    return lines
