"""`latentmill plan`: what every stage will need, before anything is downloaded or computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipeline.options import with_project
from pipeline.store import disk
from pipeline.store.disk import DiskError, format_bytes, require_room
from pipeline.terminal import fold, format_seconds, format_table, tell

if TYPE_CHECKING:
    from pipeline.project.outlook import Need
    from pipeline.project.project import Project

PLANS = "Plan whole computes no block twice, plan blocks every block; a number: the last so many are not computed twice."


@click.command("plan")
@click.option("--memory", "gigabytes", type=float, help="Memory to use, in GB.  [default: what this machine has to give]")
@click.option("--verbose", is_flag=True, help="Show rows and how each stage computes too.")
@with_project
def command(project: Project, gigabytes: float | None, verbose: bool) -> int:
    """Show what each stage will need: what is to do, time, memory, disk. Memory and disk are computed from shapes, without
    loading a model. Time is computed from the speed of the last run. The exit code is 2 if a stage does not fit into
    memory or on the disk, else 0.
    """
    if gigabytes is not None and gigabytes <= 0:
        raise ValueError(f"--memory must be > 0 GB, got {gigabytes:g}")
    lines, fits = report(project, None if gigabytes is None else int(gigabytes * 1e9), verbose)
    for line in lines:
        tell(fold(line))
    return 0 if fits else 2


def report(project: Project, budget: int | None = None, verbose: bool = False) -> tuple[list[str], bool]:
    """The lines, and whether every stage fits into `budget` bytes (None: what this machine has) and on the disk."""
    from pipeline.project.outlook import download_writes, downloads, licence_note, need, outlook, require_trainable
    from stages.memory import PROGRAM_BYTES, refusal

    require_trainable(project)
    seen = outlook(project, budget)
    needs = [need(project, name, seen) for name in project.stage_names]
    family = f"family {project.family.name}, " if project.pipeline.families else ""
    free = format_bytes(disk.free_bytes(project.path))
    lines = [f"{project.name}: {family}{format_bytes(seen.budget)} of memory to use, {free} of disk free"]
    # What a stage has to do if one of those before it has, their new rows decide.
    busy = {each.stage_name for each in needs if each.missing}
    depends = [bool(busy.intersection(project.pipeline.upstream(each.stage_name)) - {each.stage_name}) for each in needs]
    rows = [row(each, verbose, on_others) for each, on_others in zip(needs, depends, strict=True)]
    names = [name for name in NAMES if any(found.get(name) for found in rows)]
    cells = [[found.get(name) for name in names] for found in rows]
    lines += format_table(names, cells, right=("rows", "to do", "disk", "memory", "time")).splitlines()
    absent = downloads(project)
    if absent:
        parts = ", ".join(f"{name} {format_bytes(size)}" if size else name for name, size in absent.items())
        known = all(absent.values())
        total = f"{format_bytes(sum(absent.values()))} in all" if known else f"from {project.family.source}"
        lines.append(f"to download{', about' if known else ''}: {parts}; {total}")
        lines += filter(None, [licence_note(project)])
    # With the nearest settings that fit.
    refused = [
        refusal(each.stage_name, each.forecast.peak, seen.budget, each.forecast.remedy)
        for each in needs
        if each.forecast and each.forecast.peak > seen.budget
    ]
    here = [(project.path / "tables", sum(each.writes for each in needs))]
    try:
        require_room("what is to do", [*here, *download_writes(project, absent)] if absent else here)
    except DiskError as error:
        refused.append(str(error))
    lines += refused
    if any(found["to do"] == DEPENDS for found in rows):
        lines.append(f'"{DEPENDS}": what the stages above change; training begins anew with step 0 if the data change.')
    lines.append("Memory and disk are computed, time is at the speed of the last run.")
    lines.append("A dash means little, or not known before the stages above have run.")
    if verbose:
        beside = any(each.forecast and 0 < each.forecast.arrays < each.forecast.peak for each in needs)
        program = f"Memory is that of arrays; the program takes up to {format_bytes(PROGRAM_BYTES)} more."
        lines.append("Memory is what the GPU's driver counts: arrays, and what CUDA takes beside them." if beside else program)
        lines.append(PLANS)
    return lines, not refused


DEPENDS = "as above"  # in place of "0 steps", which may be false
NAMES = ("stage", "to do", "time", "memory", "disk", "rows", "how", "note")


def row(each: Need, verbose: bool, depends: bool) -> dict[str, str | int | None]:
    found = each.forecast
    known = each.missing != 0 or not depends
    shown = {
        "stage": each.stage_name,
        "to do": (each.to_do if known else DEPENDS) or None,
        "time": None if each.seconds is None else format_seconds(each.seconds),
        "memory": format_bytes(found.peak) if found and found.peak else None,
        "disk": None if each.disk is None else format_bytes(each.disk),
        "note": each.note or None,
    }
    return shown | ({"rows": each.wanted, "how": found.how if found else None} if verbose else {})
