"""The console command. Everything heavy is imported by the command that needs it, so that --help answers at once."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pipeline.project.project import Project

STOPPED = 130  # the shell's code for Ctrl-C

PROJECT = click.option(
    "--project", "-p", "path", default=".", envvar="LATENTMILL_PROJECT", show_default="this folder", help="The project's folder."
)
SET = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override a setting; may be repeated. `make` hands SET over in LATENTMILL_SET.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="latentmill")
def cli() -> None:
    """Turns a folder of images into a FLUX.2 LoRA, stage by stage; every stage writes a table that you can query."""


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path), envvar="LATENTMILL_PROJECT")
@click.option(
    "--images",
    required=True,
    type=click.Path(path_type=Path),
    envvar="LATENTMILL_IMAGES",
    help="The folder of images; it is only read.",
)
@click.option(
    "--family",
    default="klein-base-4b",
    envvar="LATENTMILL_FAMILY",
    show_default=True,
    help="The model family; see `latentmill families`.",
)
@click.option("--weights", default="", help="A folder or hub id; empty: the family's own.")
@click.option(
    "--trigger",
    default="",
    envvar="LATENTMILL_TRIGGER",
    help="A word that will stand for your subject, put before every caption.",
)
def init(folder: Path, images: Path, family: str, weights: str, trigger: str) -> None:
    """Make a new project in FOLDER from a folder of images."""
    from pipeline.project.init import new_project

    for line in new_project(folder.expanduser(), images.expanduser(), family, weights, trigger):
        click.echo(line)


@cli.command()
@click.argument("stage")
@click.option("--memory", "measured", is_flag=True, help="Also measure MLX's memory batch by batch, into tables/memory.")
@PROJECT
@SET
def run(stage: str, measured: bool, path: str, overrides: tuple[str, ...]) -> None:
    """Bring the table of a stage up to date.

    STAGE is images, captions, buckets, latents, embeddings, train, samples or scores. The tables that it reads are taken as
    they stand; `make STAGE` brings those up to date first.
    """
    from pipeline import runner
    from pipeline.terminal import Terminal

    project = open_project(path, overrides, fetch=True)
    project.stage(stage)
    meter = None
    if measured:
        from pipeline.commands.memory import stage_report
        from stages.tuner.blockwise.meter import Meter

        meter = Meter()
    with Terminal(stage) as terminal:
        outcome = runner.run(project, stage, terminal, meter)
    click.echo(summary(outcome))
    for line in stage_report(meter, project, stage) if meter else ():
        click.echo(line)
    for line in results(project, stage):
        click.echo(line)


@cli.command()
@click.option("--every", type=click.IntRange(1), default=250, show_default=True, help="Steps from one preview to the next.")
@PROJECT
@SET
def segments(every: int, path: str, overrides: tuple[str, ...]) -> int:
    """Train in segments, each a process of its own, and draw previews after each."""
    from pipeline.commands.segments import segments as walk

    return walk(path, every, overrides or split_overrides(os.environ.get("LATENTMILL_SET", "")))


@cli.command()
@PROJECT
@SET
def evaluate(path: str, overrides: tuple[str, ...]) -> None:
    """Show what the scores say: the base, each adapter and real pictures side by side. `make evaluate` makes the scores first."""
    from pipeline.commands.evaluate import evaluate as compare

    for line in compare(open_project(path, overrides)):
        click.echo(line)


@cli.command()
@PROJECT
@SET
def status(path: str, overrides: tuple[str, ...]) -> None:
    """Show what stands and what is missing.

    Every table with its recipe, rows and bytes, and what the next run would do. Nothing is written.
    """
    from pipeline.commands.status import render

    click.echo(render(open_project(path, overrides)))


@cli.command()
@click.argument("sql", required=False, envvar="LATENTMILL_SQL")
@click.option("--format", "style", type=click.Choice(["table", "csv", "json"]), default="table", show_default=True)
@click.option(
    "--parquet",
    type=click.Path(path_type=Path),
    help="Instead of a query: write every table as Parquet to this folder, with a catalog that DuckDB's own shell opens.",
)
@PROJECT
@SET
def query(sql: str | None, style: str, parquet: Path | None, path: str, overrides: tuple[str, ...]) -> None:
    """Ask the tables in SQL (DuckDB).

    Each bears its stage_name: images, captions, ..., scores. Also: tables, columns, unused.
    """
    from pipeline.commands.query import export_parquet, run_query

    if parquet:
        export_parquet(open_project(path, overrides), parquet)
        click.echo(f"wrote {parquet / 'catalog.duckdb'} and a Parquet file per table")
        return
    if not sql:
        raise ValueError(
            """no SQL given; for instance: latentmill query "select rejected, count(*) from images group by all" """.strip()
        )
    click.echo(run_query(open_project(path, overrides), sql, style))


@cli.command()
@click.argument("what", required=False, envvar="LATENTMILL_WHAT")
@PROJECT
@SET
def follow(what: str | None, path: str, overrides: tuple[str, ...]) -> None:
    """Follow one image through every table. WHAT: a path, an image_id, or part of a caption."""
    from pipeline.commands.follow import follow as through

    if not what:
        raise ValueError(
            "follow what? A path, the start of an image_id, or part of a caption; with make: make follow WHAT=cat.jpg"
        )
    for line in through(open_project(path, overrides), what):
        click.echo(line)


@cli.command()
@click.argument("out", required=False, type=click.Path(path_type=Path))
@click.option(
    "--style", type=click.Choice(["diffusers", "comfyui"]), default="diffusers", show_default=True, help="The key names."
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="bfloat16", show_default=True)
@click.option("--step", type=int, help="A checkpoint's step; without it, the end of the run.")
@click.option(
    "--which",
    type=click.Choice(["last", "average", "best"]),
    default="last",
    show_default=True,
    help="The adapter as trained, its average ([train.ema]), or the one that measured best ([train.validation]).",
)
@click.option("--merged", is_flag=True, help="The whole transformer with the adapter in its weights, as diffusers loads one.")
@PROJECT
@SET
def export(
    out: Path | None,
    style: str,
    dtype: str,
    step: int | None,
    which: str,
    merged: bool,
    path: str,
    overrides: tuple[str, ...],
) -> None:
    """Write the adapter for other programs.

    OUT is a file ending in .safetensors, or a folder; without it, exports/ in the project. With --merged it is a new folder.
    """
    from pipeline.commands.export import export_run, merge_run

    def say(line: str) -> None:
        click.echo(line, err=True)

    project = open_project(path, overrides)
    if merged and style != "diffusers":
        raise ValueError(f"export: --merged writes diffusers' layout; leave out --style {style}")
    if merged:
        click.echo(f"wrote {merge_run(project, out, dtype=dtype, step=step, which=which, say=say)}")
    else:
        click.echo(f"wrote {export_run(project, out, style, dtype=dtype, step=step, which=which, say=say)}")


@cli.command()
@click.argument("step", type=int)
@PROJECT
@SET
def replay(step: int, path: str, overrides: tuple[str, ...]) -> None:
    """Compute one step of the training run once more, and compare its losses with the table."""
    from pipeline.commands.replay import replay_run
    from pipeline.terminal import Terminal

    with Terminal("replay") as terminal:
        lines = list(replay_run(open_project(path, overrides), step, terminal.progress))
    for line in lines:
        click.echo(line)


@cli.command()
@click.option("--runs", is_flag=True, help="Also runs and samples of other configurations, where the present one has its own.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@PROJECT
@SET
def clean(runs: bool, dry_run: bool, path: str, overrides: tuple[str, ...]) -> None:
    """Free disk: delete what no present row names.

    Old rows, and tables of other configurations where the present one has its own. Trained adapters stay.
    """
    from pipeline.commands.clean import clean as sweep

    for line in sweep(open_project(path, overrides), runs=runs, dry_run=dry_run):
        click.echo(line)


@cli.command()
@click.option("--project", "-p", "path", help="The project whose settings are taken; without it, --family.")
@click.option("--family", help="A family's true shape, on random weights.")
@click.option("--pixels", type=int, help="Side of the images; a project's largest resolution.")
@click.option("--bits", type=click.Choice(["16", "8", "4"]), help="Of the base's weights.")
@click.option("--plan", help="whole, blocks, a number of blocks to keep, or auto.")
@click.option("--rank", type=int, help="Of the adapter.")
@click.option("--steps", type=int, default=6, show_default=True, help="How many are measured.")
def memory(path: str | None, **given: Any) -> None:
    """Show what training takes of memory, phase by phase, what leaks, and what would fit."""
    from pipeline.commands.memory import command

    for line in command(open_project(path) if path else None, given):
        click.echo(line)


@cli.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure steps, encoders and reading; a row each. `latentmill bench --help` has the options."""
    from tests.bench.measure import main as measure

    measure(list(arguments), prog_name="latentmill bench", standalone_mode=False)


@cli.command()
def families() -> None:
    """List the model families, their licences and sizes."""
    from stages.text_to_image.families import FAMILIES

    for family in FAMILIES.values():
        click.echo(f"{family.name:16} {family.title}; {family.licence}; weights: {family.source}")


def open_project(path: str, overrides: tuple[str, ...] = (), *, fetch: bool = False) -> Project:
    """The project in that folder. `fetch`: weights may be downloaded."""
    from pipeline.project.project import Project

    return Project(path, overrides or split_overrides(os.environ.get("LATENTMILL_SET", "")), fetch=fetch)


def split_overrides(text: str) -> tuple[str, ...]:
    """What `make SET=...` hands on: each override begins at a section.key=, so that values may hold spaces, as [64, 96] does."""
    return tuple(re.split(r"\s+(?=[A-Za-z_]\w*(?:\.\w+)+\s*=)", text.strip())) if text.strip() else ()


def summary(outcome: Any) -> str:
    """One line about a run."""
    from pipeline.terminal import spell_bytes, spell_seconds

    if outcome.up_to_date:
        return f"{outcome.stage_name}: up to date, {outcome.rows} rows"
    if outcome.left:
        kept = f"{outcome.stage_name}: {outcome.reason}; {outcome.written} new rows are kept, {outcome.left} are still to do"
        return f"{kept}. The same command goes on from here."
    parts = [f"{outcome.written} rows written"]
    parts += [f"{outcome.removed} rows no longer wanted"] if outcome.removed else []
    parts += [f"{outcome.rows} in all", spell_seconds(outcome.seconds), f"peak memory {spell_bytes(outcome.peak_rss)}"]
    parts += [f"of it MLX {spell_bytes(outcome.peak_mlx)}"] if outcome.peak_mlx else []
    return f"{outcome.stage_name}: {', '.join(parts)}"


def results(project: Project, stage_name: str) -> list[str]:
    """Where the things lie that a user came for: the adapter, the grid."""
    stage = project.stage(stage_name)
    found = []
    for name in [*(read.name for read in stage.reads), stage_name] if stage.result else []:
        result = project.stage(name).result
        path = project.current(name).folder / "artifacts" / result
        found += [f"{result.split('.')[0]}: {path}"] if result and path.exists() else []
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run the command. A user's mistake is one line and exit code 2; an interrupt is one line and 130.

    The process ends here, without the usual winding up: everything is on the disk by now, and the libraries' native
    threads (MLX, Lance, DuckDB) do not always let an interpreter go quietly. An interrupt cannot come in between either.
    """
    code = guarded(lambda: cli.main(arguments, prog_name="latentmill", standalone_mode=False))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a pipe whose reader is gone
            stream.flush()
    os._exit(code)


def guarded(command: Callable[[], Any]) -> int:
    """The exit code of a command; what went wrong, in one line on standard error."""
    from pipeline.errors import Stopped

    try:
        code = command()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except Stopped as stop:
        click.echo(str(stop), err=True)
        return STOPPED
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted; what was committed is kept, and the same command goes on from there", err=True)
        return STOPPED
    except (ValueError, OSError, MemoryError) as error:
        if os.environ.get("LATENTMILL_TRACEBACK"):
            raise
        click.echo(f"error: {one_line(error)}", err=True)
        return 2
    except RuntimeError as error:  # MLX's way to say that the memory is gone; any other is a mistake of ours
        if os.environ.get("LATENTMILL_TRACEBACK") or not re.search(r"alloc|out of memory", str(error), re.IGNORECASE):
            raise
        click.echo(f"error: not enough memory: {one_line(error)}; smaller batches or resolutions need less", err=True)
        return 2
    return code if isinstance(code, int) else 0


def one_line(error: BaseException) -> str:
    """An error's text without line breaks; its kind where it has no text."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror.lower()}"
    return " ".join(str(error).split()) or type(error).__name__
