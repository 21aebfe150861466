"""What stands and what is missing, table by table."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.project.hub import Absent
from pipeline.project.project import NotBuilt, Project
from pipeline.project.recipe import short
from pipeline.store.lock import lock_holder
from pipeline.store.rows import missing
from pipeline.terminal import spell_bytes


@dataclass
class TableState:
    """One table under the present configuration. `missing` is None where it cannot be known yet."""

    stage_name: str
    recipe: str = "-"
    rows: int = 0
    missing: int | None = None
    unseen: int = 0  # wanted rows that are there, but that no finished run has shown to readers
    begun: bool = False  # a run has committed rows and did not finish
    surplus: int = 0
    dead: int = 0
    nbytes: int = 0
    peak: int = 0
    writer: str = ""
    note: str = ""
    behind: list[str] = field(default_factory=list)  # tables that it reads and that are not up to date


def state(project: Project, stage_name: str) -> TableState:
    """Ask one table, without weights and without writing."""
    found = TableState(stage_name)
    try:
        _ask(project, found)
    except NotBuilt as error:
        found.note = f"waits: {str(error).split(',')[0]}"
    except Absent:
        found.note = f"not built; its weights come with it: make {stage_name}"
    except ValueError as error:
        found.note = str(error)
    return found


def _ask(project: Project, found: TableState) -> None:
    stage = project.stage(found.stage_name)
    found.recipe = short(project.recipe(found.stage_name))
    folder = project.current(found.stage_name)
    found.writer = lock_holder(folder.folder / "lock")
    usage = folder.usage()
    found.rows, found.dead, found.nbytes = usage["rows"], usage["dead"], usage["bytes"]
    committed = folder.committed()
    found.begun = bool(committed["live"].null_count)
    stored = committed.select(folder.schema.stored.names).cast(folder.schema.stored)
    shown = folder.rows() if folder.exists else stored.slice(0, 0)
    wanted = stage.wants(project.context(stage, artifacts=folder.folder / "artifacts", stored=stored))
    found.missing = missing(wanted, stored).num_rows
    found.unseen = missing(wanted, shown).num_rows - found.missing
    found.surplus = missing(shown.select(wanted.column_names), wanted).num_rows
    if folder.exists:
        found.peak = folder.manifest().get("facts", {}).get("run", {}).get("peak_rss", 0)


def states(project: Project) -> list[TableState]:
    """The state of every table, in the order of the chain."""
    stale: dict[str, list[str]] = {}  # table -> tables among it and its inputs that are not up to date
    found = [state(project, name) for name in project.stage_names]
    for each in found:
        each.behind = list(dict.fromkeys(name for read in project.stage(each.stage_name).reads for name in stale[read.name]))
        stale[each.stage_name] = each.behind if describe(each).startswith("up to date") else [each.stage_name]
    return found


def describe(found: TableState) -> str:
    """The state in words."""
    if found.writer:
        so_far = f"{found.unseen} of {found.unseen + (found.missing or 0)} rows are there; " if found.begun else ""
        return f"{so_far}being written by {found.writer}"
    if found.note:
        return found.note
    if found.missing or found.unseen or found.surplus:
        return f"{', '.join(_parts(found))}: make {found.stage_name}"
    return (
        f"up to date, but {' and '.join(found.behind)} {'is' if len(found.behind) == 1 else 'are'} not"
        if found.behind
        else "up to date"
    )


def _parts(found: TableState) -> list[str]:
    missed = found.missing or 0
    if found.begun:
        parts = [f"interrupted: {found.unseen} of {found.unseen + missed} rows are there"]
    else:
        parts = [f"{_rows(missed)} missing"] if missed else []
        parts += [f"{_rows(found.unseen)} wanted again"] if found.unseen else []
    return [*parts, *([f"{_rows(found.surplus)} no longer wanted"] if found.surplus else [])]


def _rows(count: int) -> str:
    return f"{count} row{'' if count == 1 else 's'}"


def render(project: Project) -> str:
    """The states of all tables as text, a line each."""
    head = ("table", "recipe", "rows", "dead", "bytes", "peak memory", "state")
    lines = [head]
    for found in states(project):
        peak = spell_bytes(found.peak) if found.peak else "-"
        numbers = (str(found.rows), str(found.dead), spell_bytes(found.nbytes), peak)
        lines.append((found.stage_name, found.recipe, *numbers, describe(found)))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
    body = ["  ".join([*(cell.ljust(w) for cell, w in zip(line[:-1], widths, strict=True)), line[-1]]) for line in lines]
    return "\n".join([f"{project.name}: family {project.family.name}, {project.path}", *body])
