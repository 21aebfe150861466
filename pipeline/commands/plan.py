"""`latentmill plan`: what every stage will need, before anything is downloaded or computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from pipeline.commands import own
from pipeline.options import JSON, give_json, with_project
from pipeline.store import disk
from pipeline.store.disk import DiskError, format_bytes, require_room
from pipeline.terminal import Terminal, fold, format_seconds, format_table, tell
from stages.pipelines import load

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pipeline.project.outlook import Download, Need
    from pipeline.project.project import Project

PLANS = "Plan whole computes no block twice, plan blocks every block; a number: the last so many are not computed twice."


@click.command("plan")
@click.option("--memory", "gigabytes", type=float, help="Memory to use, in GB.  [default: what this machine has to give]")
@click.option("--verbose", is_flag=True, help="Show rows and how each stage computes too.")
@JSON
@with_project
def command(project: Project, gigabytes: float | None, verbose: bool, as_json: bool) -> int:
    """Show what each stage will need: what is to do, time, memory, disk. What is to do is counted for the chain: each stage on
    what those before it will leave; new pictures are read for it. Memory and disk are computed from shapes, without loading
    a model. Time is computed from the speed of the last run. The exit code is 2 if a stage does not fit into memory or on
    the disk, or will stop at a mistake, else 0.
    """
    if gigabytes is not None and gigabytes <= 0:
        raise ValueError(f"--memory must be > 0 GB, got {gigabytes:g}")
    with Terminal("plan") as terminal:
        found = make_plan(project, None if gigabytes is None else int(gigabytes * 1e9), terminal)
    if as_json:
        give_json(found.plain())
    for line in () if as_json else found.lines(verbose):
        tell(fold(line))
    return 0 if found.ready else 2


@dataclass(frozen=True)
class Plan:
    project: Project
    budget: int  # bytes of memory
    free: int  # bytes of disk
    needs: list[Need]
    absent: Mapping[str, Download]  # what has to be downloaded
    refused: list[str]  # what does not fit, with the nearest settings that do
    hints: list[str]

    @property
    def ready(self) -> bool:
        """Into memory and on the disk, and no stage will stop at a mistake."""
        return not (self.refused or any(each.stops for each in self.needs))

    def lines(self, verbose: bool = False) -> Iterator[str]:
        from pipeline.project.outlook import licence_note
        from stages.memory import PROGRAM_BYTES

        project = self.project
        family = f"family {project.family.name}, " if project.pipeline.families else ""
        yield f"{project.name}: {family}{format_bytes(self.budget)} of memory to use, {format_bytes(self.free)} of disk free"
        shown = [row(each, verbose) for each in self.needs]
        names = [name for name in NAMES if any(each.get(name) for each in shown)]
        cells = [[each.get(name) for name in names] for each in shown]
        yield from format_table(names, cells, right=("rows", "to do", "disk", "memory", "time")).splitlines()
        if self.absent:
            sizes = {name: each.size for name, each in self.absent.items()}
            parts = ", ".join(f"{name} {format_bytes(size)}" if size else name for name, size in sizes.items())
            known = all(sizes.values())
            total = f"{format_bytes(sum(sizes.values()))} in all" if known else f"from {project.family.source}"
            yield f"to download{', about' if known else ''}: {parts}; {total}"
            yield from filter(None, [licence_note(project)])
        yield from (*self.refused, *self.hints)
        if "time" in names:
            yield "Memory and disk are computed, time is at the speed of the last run."
        else:
            unknown = any(each.forecast and each.missing for each in self.needs)
            later = " Time is known once a stage has run here at the same size." if unknown else ""
            yield f"Memory and disk are computed.{later}"
        yield "A dash means little, or not known before the stages above have run."
        if verbose:
            beside = any(each.forecast and 0 < each.forecast.arrays < each.forecast.peak for each in self.needs)
            program = f"Memory is that of arrays; the program takes up to {format_bytes(PROGRAM_BYTES)} more."
            yield "Memory is what the GPU's driver counts: arrays, and what CUDA takes beside them." if beside else program
            yield PLANS

    def plain(self) -> dict[str, Any]:
        """For JSON; sizes in bytes, times in seconds, null: not known."""
        stages = [
            {"stage": each.stage_name, "to_do": each.to_do, "rows": each.wanted, "missing": each.missing}
            | {"seconds": each.seconds, "memory": each.forecast.peak if each.forecast else None, "disk": each.disk}
            | {"how": each.forecast.how if each.forecast else "", "stops": each.stops, "note": each.note}
            for each in self.needs
        ]
        downloads = {name: each.size or None for name, each in self.absent.items()}
        facts = {"project": self.project.name, "fits": not self.refused, "memory": self.budget, "free_disk": self.free}
        return facts | {"stages": stages, "downloads": downloads, "refused": self.refused, "hints": self.hints}


def make_plan(project: Project, budget: int | None = None, console: Terminal | None = None) -> Plan:
    """`budget`: bytes of memory; None: what this machine has."""
    from pipeline.project.outlook import download_writes, downloads, needs, outlook, require_trainable
    from stages.memory import refusal
    from stages.run import Report

    require_trainable(project)
    seen = outlook(project, budget)
    found = list(needs(project, seen, Report(progress=console.progress) if console else None))
    absent = downloads(project)
    refused = [
        refusal(each.stage_name, each.forecast.peak, seen.budget, each.forecast.find_remedy())
        for each in found
        if each.forecast and each.forecast.peak > seen.budget
    ]
    here = [(project.path / "tables", sum(each.writes for each in found))]
    try:
        require_room("what is to do", [*here, *download_writes(project, absent.values())] if absent else here)
    except DiskError as error:
        refused.append(str(error))
    free = disk.free_bytes(project.path)
    return Plan(project, seen.budget, free, found, absent, refused, list(hints_of(project, found)))


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
