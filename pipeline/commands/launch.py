"""`latentmill launch`: trains on several Macs or GPUs at once."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.options import with_project

if TYPE_CHECKING:
    from pipeline.project.project import Project


@click.command("launch")
@click.argument("stage", default="train")
@click.option("--ranks", type=click.IntRange(1, 1024), help="Processes on this machine: one for each GPU.")
@click.option("--hosts", default="", metavar="A,B", help="Addresses of the machines, as mlx.launch takes them.")
@click.option("--hostfile", default="", help="A file of hosts, as mlx.distributed_config writes it.")
@click.option("--name", "run_name", default="", envvar="LATENTMILL_NAME", help="Name the run.")
@with_project
def command(stage: str, ranks: int | None, hosts: str, hostfile: str, run_name: str, project: Project) -> int:
    """Train on several processes. Each process computes its share of every batch. STAGE is the stage that trains. With
    --ranks, all processes run on this machine, one for each GPU. With --hosts or --hostfile, `mlx.launch` starts one
    process on each machine by ssh. The project must then lie in the same folder on all machines.

    The first process (rank 0) writes all files. The run draws the same samples as a run with one process.
    """
    from pipeline import launcher
    from pipeline.project import runs

    if not runs.trains(project.stage(stage).writes):
        raise ValueError(f"{stage}: only a stage that trains divides its work among ranks; run `latentmill {stage}`")
    if bool(ranks) + bool(hosts) + bool(hostfile) > 1:
        raise ValueError("launch takes one of --ranks, --hosts and --hostfile")
    words = run_words(stage, project, run_name)
    if hosts or hostfile:
        os.execv(mlx_launch(), [mlx_launch(), *(["--hosts", hosts] if hosts else ["--hostfile", hostfile]), "--", *words])
    count = ranks or project.config.sections[stage].data_parallel
    if not count:
        raise ValueError("launch needs --ranks, --hosts, --hostfile or the setting [train] data_parallel")
    with tempfile.TemporaryDirectory(prefix="latentmill-") as folder:
        environments = launcher.rank_environments(count, Path(folder, "hosts.json"), launcher.visible_gpus(count))
        return launcher.run_ranks(words, environments, lambda line: click.echo(line, err=True))


def run_words(stage: str, project: Project, run_name: str) -> list[str]:
    overrides = [str(one) for one in project.overrides]
    words = [sys.executable, "-m", "pipeline", "run", stage, "--project", str(project.path.resolve())]
    words += [word for one in overrides for word in ("--set", one)]
    return [*words, "--name", run_name] if run_name else words


def mlx_launch() -> str:
    """The program mlx.launch, which comes with MLX. Raises ValueError if it is missing."""
    beside = Path(sys.executable).with_name("mlx.launch")
    found = str(beside) if beside.exists() else shutil.which("mlx.launch")
    if not found:
        raise ValueError("mlx.launch is not installed; it comes with the package mlx")
    return found
