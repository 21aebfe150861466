"""What stands and what is missing, table by table."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.fingerprint import short
from pipeline.project import NotBuilt, Project
from pipeline.store import missing
from pipeline.terminal import spell_bytes


@dataclass
class TableState:
    """One table under the present configuration. `missing` is None where it cannot be known yet."""

    noun: str
    recipe: str = "-"
    rows: int = 0
    missing: int | None = None
    surplus: int = 0
    dead: int = 0
    nbytes: int = 0
    peak: int = 0
    note: str = ""


def state(project: Project, noun: str) -> TableState:
    """Ask one table, without weights and without writing."""
    found = TableState(noun)
    try:
        found.recipe = short(project.recipe(noun))
        folder = project.current(noun)
        stored = folder.rows() if folder.exists else None
        stage = project.stage(noun)
        context = project.context(
            stage, artifacts=folder.folder / "artifacts", **({"stored": stored} if stored is not None else {})
        )
        wanted = stage.wants(context)
        found.missing = missing(wanted, context.stored).num_rows
        found.surplus = missing(context.stored.select(wanted.column_names), wanted).num_rows
        usage = folder.usage()
        found.rows, found.dead, found.nbytes = usage["rows"], usage["dead"], usage["bytes"]
        found.peak = folder.manifest().get("facts", {}).get("run", {}).get("peak_rss", 0) if folder.exists else 0
    except NotBuilt as error:
        found.note = f"waits: {str(error).split(',')[0]}"
    except ValueError as error:
        found.note = str(error)
    return found


def describe(found: TableState) -> str:
    """The state in words."""
    if found.note:
        return found.note
    if not found.missing and not found.surplus:
        return "up to date"
    parts = [f"{found.missing} rows missing"] if found.missing else []
    parts += [f"{found.surplus} rows no longer wanted"] if found.surplus else []
    return f"{', '.join(parts)}: make {found.noun}"


def render(project: Project) -> str:
    """The table of tables, one line each."""
    head = ("table", "recipe", "rows", "dead", "bytes", "peak memory", "state")
    lines = [head]
    for noun in project.nouns:
        found = state(project, noun)
        peak = spell_bytes(found.peak) if found.peak else "-"
        lines.append((noun, found.recipe, str(found.rows), str(found.dead), spell_bytes(found.nbytes), peak, describe(found)))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
    body = ["  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[-1]]) for line in lines]
    return "\n".join([f"{project.name}: family {project.family.name}, {project.path}", *body])
