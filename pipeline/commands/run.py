"""`latentmill run`: runs one stage, which brings its table up to date. `latentmill launch`: trains on several Macs or GPUs."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.commands import own
from pipeline.notify import notifying
from pipeline.options import with_project
from pipeline.process import allow_open_files, kept_awake, replace_process, restarting, run_apart
from pipeline.store.disk import atomic_write, format_bytes
from pipeline.terminal import Terminal, format_seconds, say_aside, tell
from stages.bundled import shell_path
from stages.tuner.launched import SECRET_FILE, launched_rank

if TYPE_CHECKING:
    from pipeline.project.project import Project
    from pipeline.runner import Outcome
    from stages.stage import Stage
    from stages.tuner.blockwise.meter import Meter


@click.command("run")
@click.argument("stage")
@click.option("--only", is_flag=True, help="Run no other stage: take the tables that it reads as they are.")
@click.option(
    "--memory", "measured", is_flag=True, help="Also measure MLX's memory batch by batch, and write the figures to tables/memory."
)
@click.option("--name", "run_name", default="", help="Name the run, if the stage trains.")
@with_project
def command(stage: str, only: bool, measured: bool, run_name: str, project: Project) -> None:
    """Run one stage, which brings its table up to date. STAGE is the name of a table in `latentmill status`; `latentmill
    STAGE` is short for it. The tables that the stage reads are brought up to date first, each by a process of its own;
    --only takes them as they are.
    """
    if only or launched_rank() is not None:  # of several ranks, each would write the tables
        run_one(project, stage, measured, run_name)
        return
    with notifying(project.name, f"run {stage}"):
        bring_up_to_date(project, project.chain(stage))
        run_one(project, stage, measured, run_name)


def run_one(project: Project, stage: str, measured: bool, run_name: str) -> None:
    from pipeline import runner

    project.stage(stage)
    meter = None
    if measured:
        from stages.tuner.blockwise.meter import Meter

        meter = Meter()

    def artifacts() -> Path | None:
        try:
            return project.current(stage).folder / "artifacts"
        except ValueError:  # an input or weights are missing; running the stage reports it
            return None

    allow_open_files()
    with restarting(artifacts, say_aside, replace_process), kept_awake(), Terminal(stage) as terminal:
        outcome = runner.run(project, stage, terminal, meter, run_name=run_name)
    # Of several ranks, one reports.
    if launched_rank():
        return
    tell(summary(outcome))
    for line in stage_report(meter, project, stage) if meter else ():
        tell(line)
    for line in results(project, stage):
        tell(line)


def bring_up_to_date(project: Project, names: Iterable[str], *, quiet: bool = False) -> None:
    """Run each stage in a process of its own, so no two models are in memory together; `quiet`: output to standard error."""
    from pipeline.runner import run_words

    for name in names:
        if code := run_apart(run_words(project, name, "--only"), quiet=quiet):
            raise click.exceptions.Exit(code)
    project.refresh()


def summary(outcome: Outcome) -> str:
    if outcome.up_to_date:
        return f"{outcome.stage_name}: up to date, {outcome.whole}"
    if outcome.left:
        return f"{outcome.stage_name}: {outcome.reason}"
    one = outcome.removed == 1
    parts = [f"{outcome.restored} taken back from checkpoints"] if outcome.restored else []
    parts += [f"{outcome.done} done"] if outcome.done else []
    if outcome.removed and not outcome.last:
        parts += [f"{outcome.removed} earlier {'one is' if one else 'ones are'} not used any more"]
    parts += [f"{outcome.whole.partition(' ')[0]} in all"]
    if outcome.last:
        parts += [f"those up to {outcome.last} are kept ({outcome.stage_name}.steps = {outcome.last} takes them back)"]
    parts += [format_seconds(outcome.seconds)]
    parts += [f"peak memory {format_bytes(outcome.footprint)}"]
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
    # The last stage that a user came for.
    if lines and stage_name == project.pipeline.results[-1]:
        where = f"PROJECT={shell_path(project.path)}"
        more = {"export": "", "generate": " WHAT='...'"}
        known = own(project.config.project.pipeline).commands
        lines.append(f"next: make view {where}")
        if step := unfinished(project, stage):
            words = {"export": "export", "generate": "generate '...'"}
            lines += [f"next: latentmill {what} --step {step}" for name, what in words.items() if name in known]
        else:
            lines += [f"next: make {name} {where}{given}" for name, given in more.items() if name in known]
    return lines


def unfinished(project: Project, stage: Stage) -> int | None:
    """The newest checkpoint of a run that the stage reads and that has not ended once."""
    from stages.tuner.checkpoint import find_checkpoints

    results = {project.current(read.name).folder / "artifacts": project.stage(read.name).result for read in stage.reads}
    lacking = [folder for folder, result in results.items() if result and not (folder / result).exists()]
    return next((saved.step for folder in lacking for saved in find_checkpoints(folder)), None)


def stage_report(meter: Meter, project: Project, stage_name: str) -> Iterator[str]:
    """Write tables/memory/STAGE.parquet, one row per measured batch, and yield a summary."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from stages import footprint

    batches = [row for row in meter.rows if row["phase"] == stage_name]
    if not batches:
        yield f"memory: {stage_name} computed no batch, so nothing was measured"
        return
    last = format_bytes(batches[-1]["active"])
    counted = f"{format_bytes(footprint.peak())} as the machine counts"
    yield f"memory: peak {format_bytes(meter.peak)} of arrays in {len(batches)} batches, {last} after the last; {counted}"
    yield from leak_lines(meter)
    file = project.path / "tables" / "memory" / f"{stage_name}.parquet"
    with atomic_write(file) as temporary:
        pq.write_table(pa.Table.from_pylist([{"family": project.family.name} | row for row in meter.rows]), temporary)
    yield f"rows: {file}"


def leak_lines(meter: Meter) -> Iterator[str]:
    """A line for each phase that retains more with every step, or one with the smallest leak that can be found."""
    from stages.tuner.blockwise.meter import LEAK_BYTES, LEAST_TIMES

    found = meter.leaks()
    for phase, count in found.items():
        yield f"LEAK: {phase} retains {format_bytes(count)} more every step"
    if not meter.can_find_leaks:
        yield f"too few steps to find leaks; measure {LEAST_TIMES} or more"
    elif not found:
        yield f"no phase retains {format_bytes(LEAK_BYTES)} or more per step"


@click.command("launch")
@click.argument("stage", default="train")
@click.option("--ranks", type=click.IntRange(1, 1024), help="Processes on this machine: one for each GPU.")
@click.option("--hosts", default="", metavar="A,B", help="Addresses of the machines, as mlx.launch takes them.")
@click.option("--hostfile", default="", help="A file of hosts, as mlx.distributed_config writes it.")
@click.option("--trusted-network", is_flag=True, help="The machines' network is a cable between them, or a VPN.")
@click.option("--name", "run_name", default="", help="Name the run.")
@with_project
def launch_command(
    stage: str, ranks: int | None, hosts: str, hostfile: str, trusted_network: bool, run_name: str, project: Project
) -> int:
    """Train on several processes. Each process computes its share of every batch. STAGE is the stage that trains. With
    --ranks, all processes run on this machine, one for each GPU. With --hosts or --hostfile, `mlx.launch` starts one
    process on each machine by ssh. The project must then lie in the same folder on all machines, and who can change what
    their network carries can change the training: MLX neither signs nor encrypts gradients.

    The first process (rank 0) writes all files. The run draws the same samples as a run with one process.
    """
    from pipeline.project import runs
    from pipeline.ranks import rank_environments, run_ranks, send_secret, ssh_names, visible_gpus
    from pipeline.runner import run_words

    if not runs.trains(project.stage(stage).writes):
        raise ValueError(f"{stage}: only a stage that trains divides its work among ranks; run `latentmill {stage}`")
    if bool(ranks) + bool(hosts) + bool(hostfile) > 1:
        raise ValueError("launch takes one of --ranks, --hosts and --hostfile")
    words = [*run_words(project, stage, "--only"), *(["--name", run_name] if run_name else [])]
    if hosts or hostfile:
        where = ["--hosts", hosts] if hosts else ["--hostfile", hostfile]
        program = mlx_launch()
        name = send_secret(ssh_names(hosts, hostfile, trusted_network))
        os.execv(program, [program, *where, "--env", f"{SECRET_FILE}={name}", "--", *words])
    config = project.config.sections[stage]
    count = ranks or config.data_parallel
    if not count:
        raise ValueError("launch needs --ranks, --hosts, --hostfile or the setting [train] data_parallel")
    config.check_ranks(count)
    with tempfile.TemporaryDirectory(prefix="latentmill-") as folder:
        environments = rank_environments(count, Path(folder, "hosts.json"), visible_gpus(count))
        return run_ranks(words, environments, say_aside)


def mlx_launch() -> str:
    """The program mlx.launch, which comes with MLX. Raises ValueError if it is missing."""
    beside = Path(sys.executable).with_name("mlx.launch")
    found = str(beside) if beside.exists() else shutil.which("mlx.launch")
    if not found:
        raise ValueError("mlx.launch is not installed; it comes with the package mlx")
    return found
