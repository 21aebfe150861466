"""`latentmill plan`: what every stage will need, before anything is downloaded or computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipeline.options import with_project
from pipeline.store.disk import format_bytes
from pipeline.terminal import fold, format_seconds, format_table

if TYPE_CHECKING:
    from pipeline.project.outlook import Need
    from pipeline.project.project import Project

PLANS = "Plan whole computes no block twice, plan blocks every block; a number: the last so many are not computed twice."


@click.command("plan")
@click.option("--memory", "gigabytes", type=float, help="Memory that a stage may take, in GB.  [default: this machine's]")
@with_project
def command(project: Project, gigabytes: float | None) -> int:
    """Show what each stage will need: rows, disk, memory, time. Memory and disk are computed from shapes, without
    loading a model. Time is computed from the speed of the last run. The exit code is 2 if a stage does not fit into
    memory, else 0.
    """
    if gigabytes is not None and gigabytes <= 0:
        raise ValueError(f"--memory must be > 0 GB, got {gigabytes:g}")
    lines, fits = report(project, None if gigabytes is None else int(gigabytes * 1e9))
    for line in lines:
        click.echo(fold(line))
    return 0 if fits else 2


def report(project: Project, budget: int | None = None) -> tuple[list[str], bool]:
    """The lines, and whether every stage fits into `budget` bytes (None: what this machine has)."""
    from pipeline.project.outlook import downloads, need, outlook
    from stages.memory import PROGRAM_BYTES, refusal

    seen = outlook(project, budget)
    needs = [need(project, name, seen) for name in project.stage_names]
    family = f"family {project.family.name}, " if project.pipeline.families else ""
    lines = [f"{project.name}: {family}a stage may take {format_bytes(seen.budget)} of memory"]
    names = ("stage", "rows", "to do", "disk", "memory", "time", "how")
    lines += format_table(names, [row(each) for each in needs], right=("rows", "to do", "disk", "memory", "time")).splitlines()
    absent = downloads(project)
    if absent:
        parts = ", ".join(f"{name} {format_bytes(size)}" if size else name for name, size in absent.items())
        known = all(absent.values())
        total = f"{format_bytes(sum(absent.values()))} in all" if known else f"from {project.family.source}"
        lines.append(f"to download{', about' if known else ''}: {parts}; {total}")
    # With the nearest settings that fit.
    refused = [
        refusal(each.stage_name, each.forecast.peak, seen.budget, each.forecast.remedy)
        for each in needs
        if each.forecast and each.forecast.peak > seen.budget
    ]
    lines += refused
    program = format_bytes(PROGRAM_BYTES)
    lines.append(f"Memory and disk are computed from shapes. Memory is that of arrays; the program takes up to {program} more.")
    lines.append("Time is at the rate of the last run.")
    lines.append("A dash: little, or not known before the stages above have run.")
    if any(each.forecast and each.forecast.plan is not None for each in needs):
        lines.append(PLANS)
    return lines, not refused


def row(each: Need) -> tuple[str | int | None, ...]:
    found = each.forecast
    return (
        each.stage_name,
        each.wanted,
        each.missing,
        None if each.disk is None else format_bytes(each.disk),
        format_bytes(found.peak) if found and found.peak else None,
        None if each.seconds is None else format_seconds(each.seconds),
        each.note or (found.how if found else ""),
    )
