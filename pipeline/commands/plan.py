"""`latentmill plan`: what every stage will need, before anything is downloaded or computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipeline.commands import own
from pipeline.options import with_project
from pipeline.store import disk
from pipeline.store.disk import DiskError, format_bytes, require_room
from pipeline.terminal import Terminal, fold, format_seconds, format_table, tell
from stages.pipelines import load

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipeline.project.outlook import Need
    from pipeline.project.project import Project

PLANS = "Plan whole computes no block twice, plan blocks every block; a number: the last so many are not computed twice."


@click.command("plan")
@click.option("--memory", "gigabytes", type=float, help="Memory to use, in GB.  [default: what this machine has to give]")
@click.option("--verbose", is_flag=True, help="Show rows and how each stage computes too.")
@with_project
def command(project: Project, gigabytes: float | None, verbose: bool) -> int:
    """Show what each stage will need: what is to do, time, memory, disk. What is to do is counted for the chain: each stage on
    what those before it will leave; new pictures are read for it. Memory and disk are computed from shapes, without loading
    a model. Time is computed from the speed of the last run. The exit code is 2 if a stage does not fit into memory or on
    the disk, or will stop at a mistake, else 0.
    """
    if gigabytes is not None and gigabytes <= 0:
        raise ValueError(f"--memory must be > 0 GB, got {gigabytes:g}")
    with Terminal("plan") as terminal:
        lines, fits = report(project, None if gigabytes is None else int(gigabytes * 1e9), verbose, terminal)
    for line in lines:
        tell(fold(line))
    return 0 if fits else 2


def report(
    project: Project, budget: int | None = None, verbose: bool = False, console: Terminal | None = None
) -> tuple[list[str], bool]:
    """The lines, and whether every stage fits into `budget` bytes (None: what this machine has) and on the disk, and none
    will stop at a mistake.
    """
    from pipeline.project.outlook import download_writes, downloads, licence_note, needs, outlook, require_trainable
    from stages.memory import PROGRAM_BYTES, refusal
    from stages.run import Report

    require_trainable(project)
    seen = outlook(project, budget)
    found = list(needs(project, seen, Report(progress=console.progress) if console else None))
    family = f"family {project.family.name}, " if project.pipeline.families else ""
    free = format_bytes(disk.free_bytes(project.path))
    lines = [f"{project.name}: {family}{format_bytes(seen.budget)} of memory to use, {free} of disk free"]
    shown = [row(each, verbose) for each in found]
    names = [name for name in NAMES if any(each.get(name) for each in shown)]
    cells = [[each.get(name) for name in names] for each in shown]
    lines += format_table(names, cells, right=("rows", "to do", "disk", "memory", "time")).splitlines()
    absent = downloads(project)
    if absent:
        parts = ", ".join(f"{name} {format_bytes(each.size)}" if each.size else name for name, each in absent.items())
        known = all(each.size for each in absent.values())
        total = f"{format_bytes(sum(each.size for each in absent.values()))} in all" if known else f"from {project.family.source}"
        lines.append(f"to download{', about' if known else ''}: {parts}; {total}")
        lines += filter(None, [licence_note(project)])
    # With the nearest settings that fit.
    refused = [
        refusal(each.stage_name, each.forecast.peak, seen.budget, each.forecast.remedy)
        for each in found
        if each.forecast and each.forecast.peak > seen.budget
    ]
    here = [(project.path / "tables", sum(each.writes for each in found))]
    try:
        require_room("what is to do", [*here, *download_writes(project, absent.values())] if absent else here)
    except DiskError as error:
        refused.append(str(error))
    lines += [*refused, *hints_of(project, found)]
    lines.append("Memory and disk are computed, time is at the speed of the last run.")
    lines.append("A dash means little, or not known before the stages above have run.")
    if verbose:
        beside = any(each.forecast and 0 < each.forecast.arrays < each.forecast.peak for each in found)
        program = f"Memory is that of arrays; the program takes up to {format_bytes(PROGRAM_BYTES)} more."
        lines.append("Memory is what the GPU's driver counts: arrays, and what CUDA takes beside them." if beside else program)
        lines.append(PLANS)
    return lines, not (refused or any(each.stops for each in found))


def hints_of(project: Project, needs: Sequence[Need]) -> Iterator[str]:
    """What the pipeline says about its settings as they are."""
    if reference := own(project.config.project.pipeline).hints:
        yield from load(reference)(project, {each.stage_name: each for each in needs})


NAMES = ("stage", "to do", "time", "memory", "disk", "rows", "how", "note")


def row(each: Need, verbose: bool) -> dict[str, str | int | None]:
    found = each.forecast
    shown = {
        "stage": each.stage_name,
        "to do": each.to_do or None,
        "time": None if each.seconds is None else format_seconds(each.seconds),
        "memory": format_bytes(found.peak) if found and found.peak else None,
        "disk": None if each.disk is None else format_bytes(each.disk),
        "note": each.note or None,
    }
    return shown | ({"rows": each.wanted, "how": found.how if found else None} if verbose else {})
