"""What a stage of a project needs, before it runs: rows, disk, memory, downloads. Nothing is computed or downloaded."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.forecast import PROGRAM_BYTES, Forecast, Outlook
from stages.pipelines import Weights

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

    from pipeline.project.project import Project
    from schemas.table import TableSchema

GB = 1e9


@dataclass(frozen=True)
class Need:
    """What one stage needs: rows, memory, disk and time. `wanted` is the number of rows that its table should have, or
    None if it is not known yet. `missing` is how many of these rows are not stored, or None. `forecast` gives memory
    and disk, or is None. `seconds` is the time for the missing rows at the speed of the last run, or None. `overhead`
    is the disk space in bytes that the table takes besides its tensors.

    `forecast` is None if the stage needs little memory and disk. It is also None if the forecast failed; `note` then says
    why. `seconds` is None if no row is missing or no run was measured.
    """

    stage_name: str
    wanted: int | None = None
    missing: int | None = None
    forecast: Forecast | None = None
    note: str = ""
    seconds: float | None = None
    overhead: int = 0

    @property
    def disk(self) -> int | None:
        """The disk space in bytes that the stage's finished table takes, including its files. The value is None if the
        disk space is 0 or not known.

        The disk space of the rows is known only if their number, `wanted`, is known. If `wanted` is None, the value
        counts `forecast.file_bytes` and `overhead`, but no rows. If `wanted` is None and `forecast.file_bytes` is 0,
        the value is None. It is also None if `forecast` is None.
        """
        if self.forecast is None or (self.wanted is None and not self.forecast.file_bytes):
            return None
        return (self.forecast.row_bytes * (self.wanted or 0) + self.forecast.file_bytes + self.overhead) or None


def outlook(project: Project, budget: int | None = None) -> Outlook:
    """Return the facts from which the needs of a project's stages are forecast. `project` is the opened project folder.
    `budget` is the memory in bytes that a stage may take. If it is None, the budget of this machine is used.

    The facts are the settings, the model family and the memory budget. Two functions belong to them: one returns the
    path of a component's weights, the other the rows of a table.
    """
    from stages.tuner.blockwise.device import memory_budget

    def weights(name: str) -> Path | None:
        try:
            return project.component(name, fetch=False)
        except ValueError:
            return None

    def rows(schema: TableSchema) -> pa.Table | None:
        try:
            return project.context(project.stage(schema.name)).rows(schema)
        except ValueError:  # not built yet
            return None

    family = project.family if project.pipeline.families else None
    return Outlook(project.config.sections, family, memory_budget() if budget is None else budget, weights, rows)


def forecast(project: Project, name: str, seen: Outlook | None = None) -> Forecast | None:
    """Return the forecast of memory and disk of the stage `name`. Return None if the stage needs too little for a
    forecast. `seen` holds what the forecast is computed from, such as the settings and the memory budget. If `seen` is
    None, it is made by `outlook(project)`. Raises ValueError if the model family cannot be used for this stage.
    """
    stage = project.stage(name)
    if stage.forecast is None:
        return None
    for need in stage.needs:
        if isinstance(project.pipeline.resources[need], Weights):
            project.family.require(need)
    found: Forecast = stage.forecast(seen or outlook(project))
    return found


def need(project: Project, name: str, seen: Outlook) -> Need:
    """Return what the stage `name` needs: rows, memory, disk and time. `seen` holds what forecasts are computed from,
    such as the settings and the memory budget; `outlook(project)` makes it. If the stage's inputs are built, the number
    of rows is counted. Otherwise it is forecast from the settings.
    """
    from pipeline.store.rows import missing
    from pipeline.store.shards import overhead_bytes

    try:
        found, note = forecast(project, name, seen), ""
    except ValueError as error:
        found, note = None, str(error)
    wanted = found.rows if found else None
    left, overhead = wanted, 0
    stage = project.stage(name)
    try:
        folder = project.current(name)
        stored = folder.rows() if folder.exists else None
        rows = stage.wants(project.context(stage, **({"stored": stored} if stored is not None else {})))
        wanted = rows.num_rows
        left = wanted if stored is None else missing(rows, stored).num_rows
        if stage.writes.tensors and found:
            overhead = overhead_bytes(stage.writes, rows, found.row_bytes * rows.num_rows)
    except ValueError:  # inputs or weights are not there yet
        pass
    return Need(name, wanted, left, found, note, seconds_for(project, name, left), overhead)


def refusal(stage_name: str, peak: int, remedy: str, budget: int) -> str:
    """Return the one-line message for the stage `stage_name`, which needs `peak` bytes of memory, more than `budget`
    bytes. `remedy` names settings that fit, as text; "" means that none would fit.
    """
    would = f"{remedy} would fit" if remedy else "no setting would fit; choose a smaller family"
    return f"{stage_name} needs about {peak / GB:.3g} GB of memory, more than the {budget / GB:.3g} GB that it may take: {would}"


def announcement(project: Project, name: str, rows: int) -> str:
    """Return one line that tells the user the disk space and the peak memory that a stage needs. `project` is the
    opened project folder. `name` is the name of the stage, and `rows` is the number of rows to make. The line also says
    how the stage computes, such as "images of at most 512 x 512 px". If nothing is forecast, return "". Raises
    ValueError if the stage does not fit into memory. The message names settings that fit, if any.

    Two stages are not refused here. A stage with a `snapshot` makes its own plan from its data. A stage that is divided
    among workers uses their memory.
    """
    seen = outlook(project)
    try:
        found = forecast(project, name, seen)
    except ValueError:  # the stage reports it
        return ""
    if found is None:
        return ""
    stage = project.stage(name)
    divided = project.config.project.divides(stage.divisible, rows)  # the workers have memory of their own
    if found.peak > seen.budget and stage.snapshot is None and not divided:
        raise ValueError(refusal(name, found.peak, found.remedy, seen.budget))
    disk = found.row_bytes * rows + found.file_bytes
    size = f", about {disk / 1e6:.3g} MB on disk" if disk else ""
    if not found.peak:
        return f"{rows} rows to make{size}" if disk else ""
    memory = "a worker" if divided else f"of {seen.budget / GB:.3g} GB"
    arrays, program = f"{found.peak / GB:.3g} GB for arrays", f"up to {PROGRAM_BYTES / GB:.2g} GB for the program"
    return f"{rows} rows to make{size}; estimated peak memory {arrays} {memory}, and {program} ({found.plan})"


def seconds_for(project: Project, name: str, rows: int | None) -> float | None:
    """Return the seconds that the stage `name` needs for `rows` rows at the speed of its last run. `project` is the
    opened project folder. Return None if that run wrote no rows, if there was no run, or if `rows` is 0 or None.
    """
    folder = project.folder(name)
    if not rows or not folder.exists:
        return None
    run: dict[str, Any] = folder.manifest().get("facts", {}).get("run", {})
    written = run.get("rows_written", 0)
    return rows * run["seconds"] / written if written else None


def downloads(project: Project) -> dict[str, int]:
    """Return the model components whose weights are missing on this machine. The result maps a name, such as
    "transformer", to a size in bytes. `project` is the opened project folder. The sizes are computed from the shapes of
    the weights. A size is 0 if the shapes are not known without the files. Raises ValueError if a path in the setting
    `components` does not hold its component.

    The dict is empty if the pipeline uses no model. It is also empty if the model's weights are part of the checkout or
    are generated.
    """
    from pipeline.project.hub import NotFetched

    family = project.family if project.pipeline.families else None
    for name in (project.config.project.components or {}) if family else {}:
        with suppress(NotFetched):
            project.component(name, fetch=False)
    if family is None or family.bundled or family.seeded is not None:
        return {}
    here, sizes = outlook(project, 0).weights, family.component_bytes()
    names = [name for name, kind in project.pipeline.resources.items() if isinstance(kind, Weights)]
    return {name: sizes.get(name, 0) for name in names if (name in sizes or not sizes) and here(name) is None}
