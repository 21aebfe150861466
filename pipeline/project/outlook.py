"""What a stage of a project needs, before it runs: rows, disk, memory, downloads. Nothing is computed or downloaded."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeline.errors import NotBuilt
from pipeline.project import runs
from pipeline.project.stage_run import Lazy, not_built
from pipeline.project.weights import NotFetched
from pipeline.store.disk import require_room, size_of
from stages.memory import GB, PROGRAM_BYTES, Forecast, Outlook, refusal
from stages.pipelines import Weights
from stages.settings import several
from stages.stage import Input

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa

    from pipeline.project.project import Project
    from pipeline.store.table import TableFolder
    from schemas.table import Among, TableSchema
    from stages.models.family import Family
    from stages.run import Report, Run
    from stages.stage import Stage


@dataclass(frozen=True)
class Need:
    stage_name: str
    wanted: int | None = None  # rows that its table should have; None: not known yet
    missing: int | None = None  # of these, rows that are not stored, or at most so many, as `to_do` says
    to_do: str = ""  # the same for the user, such as "1500 steps" or "up to 80 previews"
    forecast: Forecast | None = None  # None: it needs little, or the forecast failed
    note: str = ""  # why the forecast failed, or the stage would
    seconds: float | None = None  # for the missing rows, at the speed of the last run of that size; None: none missing, or no run
    overhead: int = 0  # bytes on disk that the table takes besides its tensors
    files: int = 0  # bytes of `forecast.file_bytes` that are not on the disk yet
    stops: bool = False  # the note is a mistake of the user, at which the stage will stop
    table: str = ""  # the recipe of the table that it will write; "": not known yet
    earlier: str = ""  # the run that training goes back to, since inputs or settings are those of before
    unchanged: bool = False  # that table is what the next run leaves

    @property
    def writes(self) -> int:
        """Bytes on disk that the missing rows will take."""
        if self.forecast is None or not self.missing:
            return 0
        share = self.missing / (self.wanted or self.missing)
        return int(share * ((self.disk or 0) - self.forecast.file_bytes)) + self.files

    @property
    def disk(self) -> int | None:
        """Bytes of the finished table with its files; None if not known or 0. Without `wanted`, rows do not count."""
        if self.forecast is None or (self.wanted is None and not self.forecast.file_bytes):
            return None
        return (self.forecast.row_bytes * (self.wanted or 0) + self.forecast.file_bytes + self.overhead) or None


def outlook(project: Project, budget: int | None = None, stage: str = "") -> Outlook:
    """`budget`: bytes that a stage may take; None: that of this machine. `stage`: the one that is foreseen, if its weights may
    be others than the project's.
    """
    from stages.tuner.blockwise.device import memory_budget

    def weights(name: str) -> Path | None:
        with suppress(NotFetched):
            return project.component(name, stage, fetch=False)
        return None

    def rows(schema: TableSchema, columns: Sequence[str] = (), among: Among | None = None) -> pa.Table | None:
        with suppress(NotBuilt, NotFetched):  # a table is found by what decides its rows, weights among it
            return project.rows(schema, schema.name, columns, among)
        return None

    family = None
    if project.pipeline.families:
        family = project.family_of(stage) if stage else project.family
    return Outlook(project.config.sections, family, memory_budget() if budget is None else budget, weights, rows)


def forecast(project: Project, name: str, seen: Outlook | None = None) -> Forecast | None:
    """None if the stage needs little. Raises ValueError if the model family cannot be used for it."""
    stage = project.stage(name)
    if stage.forecast is None:
        return None
    for need in stage.needs:
        if isinstance(project.pipeline.resources[need], Weights):
            project.source(need, name)[0].require(need)
    if seen is None:
        seen = outlook(project, None, name)
    elif stage.drawn_by:
        seen = replace(outlook(project, seen.budget, name), rows=seen.rows, files=seen.files)
    return stage.forecast(seen)


ANEW = "all anew: a new run, since settings, data or weights differ"
PERHAPS_ANEW = "all anew if the stages above change its data"
FEW = 200  # new files that are read for an answer that was not asked for


def needs(
    project: Project,
    seen: Outlook,
    report: Report | None = None,
    known: dict[Any, Any] | None = None,
    most: float = math.inf,
) -> Iterator[Need]:
    """Of every stage, in the order in which they run; each reads the tables as the stages before it will leave them.

    `known`: of calls for the same folder at the same time with other settings; a stage that these do not reach is taken from it.
    `most`: new files that are read; beyond, later stages are not known.
    """
    tables: dict[str, Input | None] = {}
    known = {} if known is None else known
    for name in project.listed:
        # A forecast may look at any section, the rows of a stage at those before it.
        before = project.stage_names[: project.stage_names.index(name) + 1]
        sections = project.config.sections if project.stage(name).forecast else before
        settings = repr([project.config.sections[each] for each in sections])
        key = name, repr(project.config.project), tuple(project.chain(name)), settings
        if key not in known:
            known[key] = _need(project, name, seen, tables, report, most), tables[name]
        found, tables[name] = known[key]
        yield found


def next_run(project: Project, name: str) -> Need | None:
    """What the next run of a stage that trains will do, with the stages before it; None if that cannot be said."""
    with suppress(ValueError, OSError):
        return next(each for each in needs(project, outlook(project), most=FEW) if each.stage_name == name)
    return None


def _need(
    project: Project, name: str, seen: Outlook, tables: dict[str, Input | None], report: Report | None, most: float
) -> Need:
    """`tables`: those of earlier stages, None or not `current` if not known yet. This stage adds its own."""
    from pipeline.store.rows import missing
    from pipeline.store.shards import overhead_bytes

    def rows_of(schema: TableSchema, columns: Sequence[str] = (), among: Among | None = None) -> pa.Table | None:
        found = tables.get(schema.name)
        return found.rows if found and found.rows is not None else seen.rows(schema, columns, among)

    def files_of(schema: TableSchema) -> Path | None:
        found = tables.get(schema.name)
        return found.folder / "artifacts" if found else None

    stops = False
    try:
        found, note = forecast(project, name, replace(seen, rows=rows_of, files=files_of)), ""
    except ValueError as error:
        found, note, stops = None, str(error), True
    wanted = found.rows if found else None
    left, overhead = wanted, 0
    stage = project.stage(name)
    trains = runs.trains(stage.writes)
    to_do = "" if left is None else amount(stage, left // _per_step(project.config.sections[name]) if trains else left)
    tables[name], table, earlier, unchanged, of_run = None, "", "", False, ""
    # Once the stage's inputs are known, its rows are counted instead of forecast.
    try:
        inputs = _inputs(project, stage, tables)
        try:
            folder = project.current(name, inputs)
            table = folder.folder.name
        except NotFetched:  # nothing can be stored that weights computed which are not here
            folder = project.kept.table(project.path / "tables" / name / "none", stage.writes)
        stored = folder.committed().select(stage.writes.stored.names).cast(stage.writes.stored)
        run = project.open(name, report, artifacts=folder.folder / "artifacts", stored=stored, inputs=inputs)
        rows = stage.wants(run)
        absent = missing(rows, stored)
        run.output.pending = absent
        coming = stage.computes(run, rows) if stage.computes else absent
        wanted, left, to_do = rows.num_rows, coming.num_rows, amount(stage, counted(stage, coming))
        if trains and runs.read_record(folder) is not None:
            earlier = _earlier(project, folder)
            parts = [taken_back(stage, folder, rows, coming, absent), repeated(stage, run.config, coming, absent)]
            known = f"the earlier run {earlier}" + ("" if left or any(parts) else " as it is") if earlier else ""
            of_run = ": ".join(filter(None, [known, *parts]))
        else:
            of_run = ANEW if left == wanted else ""
        if stage.writes.tensors and found:
            overhead = overhead_bytes(stage.writes, rows, found.row_bytes * rows.num_rows)
        lacks = bool(left or absent.num_rows)
        unchanged = not lacks and folder.exists and _equal(folder.rows(), rows)
        if stage.reads or coming.num_rows <= most:
            tables[name] = Input(folder.folder) if unchanged else _afterwards(stage, folder, run, rows, coming)
    except (NotBuilt, NotFetched):
        of_run = PERHAPS_ANEW
        # Some of them may be stored.
        at_most = project.folder(name).exists or (found is not None and found.at_most)
        to_do = f"up to {to_do}" if left and not trains and at_most else to_do
    except ValueError as error:  # a mistake of the user
        note, stops = note or str(error), True
    if trains and not note and any(run.stage == name for run in runs.find_runs(project)):
        note = of_run
    last = project.folder(name)
    run = last.manifest().get("facts", {}).get("run", {}) if last.exists else {}
    written = run.get("rows_written", 0)
    alike = not (found and found.size) or tuple(run.get("size") or found.size) == found.size
    seconds = left * run["seconds"] / written if left and written and alike else None
    files = files_to_write(project, name, found) if found else 0
    return Need(name, wanted, left, to_do, found, note, seconds, overhead, files, stops, table, earlier, unchanged)


def _per_step(config: Any) -> int:
    return getattr(config, "batch_size", 1) * getattr(config, "accumulate", 1)


def _inputs(project: Project, stage: Stage, tables: Mapping[str, Input | None]) -> Lazy[Input]:
    before = project.chain(stage.name)

    def find(name: str) -> Input:
        if (found := tables.get(name)) and found.current:
            return found
        if name in before:
            raise not_built(name, stage.name, project.path)
        return project.input(stage, name)

    return Lazy([each.name for each in (*stage.reads, *stage.optional)], find)


def _afterwards(stage: Stage, folder: TableFolder, run: Run[Any], wanted: pa.Table, coming: pa.Table) -> Input:
    """The stage's table after its next run, which changes it; not `current` if its rows are not known yet."""
    from pipeline.store.rows import matches

    if stage.foresee:
        return Input(folder.folder, rows=stage.foresee(run))
    if coming.num_rows:
        return Input(folder.folder, current=False)
    stored = run.output.stored
    # Rows that come back from checkpoints are known by what was wanted of them.
    rows = wanted if run.output.pending.num_rows else stored.filter(matches(stored, wanted, wanted.column_names))
    return Input(folder.folder, rows=rows)


def _equal(published: pa.Table, wanted: pa.Table) -> bool:
    from pipeline.store.rows import missing

    return published.num_rows == wanted.num_rows and not missing(wanted, published).num_rows


def _earlier(project: Project, folder: TableFolder) -> str:
    """The label of the run in `folder`, unless it is the one that readers see now."""
    try:
        present = project.current(folder.schema.name).folder
    except ValueError:  # it waits for others
        present = project.folder(folder.schema.name).folder
    if folder.folder == present:
        return ""
    return next(run.label for run in runs.find_runs(project) if run.table.folder == folder.folder)


def taken_back(stage: Stage, folder: TableFolder, wanted: pa.Table, coming: pa.Table, absent: pa.Table) -> str:
    """Of a training run whose steps are all there, but whose result is that of another one, in words; else ""."""
    import pyarrow.compute as pc

    from stages.tuner.checkpoint import ADAPTER, published_step

    total = counted(stage, wanted)
    if folder.exists and not absent.num_rows and (there := counted(stage, folder.rows())) > total:
        return f"the run has {there} steps, {total} are asked for"
    lags = stage.result == ADAPTER and published_step(folder.folder / "artifacts") != pc.max(wanted["step"]).as_py()
    return f"the {amount(stage, total)} are in checkpoints" if not coming.num_rows and (absent.num_rows or lags) else ""


def files_to_write(project: Project, name: str, found: Forecast) -> int:
    """Bytes of the stage's files that no interrupted run of the same table has written."""
    if found.file_bytes:
        with suppress(ValueError):  # NotBuilt, or weights that are missing: the table does not exist either
            return max(0, found.file_bytes - size_of(project.current(name).folder))
    return found.file_bytes


def counted(stage: Stage, rows: pa.Table) -> int:
    """Steps of a stage that trains, else rows."""
    import pyarrow.compute as pc

    if not runs.trains(stage.writes):
        return int(rows.num_rows)
    return int(pc.count_distinct(rows.filter(pc.equal(rows["split"], "train"))["step"]).as_py())


def repeated(stage: Stage, config: Any, coming: pa.Table, absent: pa.Table) -> str:
    """What a run will compute although it is stored, in words, and from where; "" if nothing or it does not train."""
    import pyarrow.compute as pc

    from pipeline.store.rows import missing

    if not runs.trains(stage.writes):
        return ""
    steps, again = (
        pc.min_max(rows.filter(pc.equal(rows["split"], "train"))["step"]).as_py() for rows in (coming, missing(coming, absent))
    )
    if again["max"] is None:
        return ""
    first, last = steps["min"], steps["max"]
    those = f"steps {first} to {last}" if last > first else f"step {last}"
    some = f"those up to {again['max']} " if again["max"] < last else ""
    why = f", from the checkpoint of step {first - 1}"
    if first == 1:
        kept = getattr(config, "keep_states", 0)  # a stage of one's own may train without this setting
        why = f", as no checkpoint up to step {last} can go on"
        why += f" ({stage.name}.keep_states = {kept})" if kept else ""
    return f"{those}, {some}again with the same result{why}" if some else f"{those} again with the same result{why}"


def amount(stage: Stage, count: int) -> str:
    """Such as "1 picture" or "1500 steps"."""
    return several(count, "step" if runs.trains(stage.writes) else stage.unit)


def announcement(project: Project, name: str, rows: int, to_do: str) -> tuple[str, int, Forecast | None]:
    """A line for the user: what is to do, disk, memory; "" if nothing is forecast. The bytes that it will write. The forecast.

    Raises ValueError if memory or disk does not suffice.
    """
    seen = outlook(project)
    try:
        found = forecast(project, name, seen)
    except ValueError:  # the stage reports it
        return "", 0, None
    if found is None:
        return "", 0, None
    stage = project.stage(name)
    divided = project.config.project.divides(stage.divisible, rows)  # the workers have memory of their own
    # A stage with a snapshot makes its own plan from its data.
    if found.peak > seen.budget and stage.snapshot is None and not divided:
        raise ValueError(refusal(name, found.peak, seen.budget, found.find_remedy()))
    disk = found.row_bytes * rows + files_to_write(project, name, found)
    require_room(name, [(project.path / "tables", disk)])
    size = f", about {disk / 1e6:.3g} MB on disk" if disk else ""
    if not found.peak:
        return f"{to_do} to do{size}" if disk else "", disk, found
    where = "a worker" if divided else f"of {seen.budget / GB:.3g} GB"
    if found.arrays < found.peak and found.arrays:
        memory = f"{found.peak / GB:.3g} GB {where}, {found.arrays / GB:.3g} GB of it arrays"
    else:
        memory = f"{found.peak / GB:.3g} GB for arrays {where}, and up to {PROGRAM_BYTES / GB:.2g} GB for the program"
    return f"{to_do} to do{size}; estimated peak memory {memory}", disk, found


@dataclass(frozen=True)
class Download:
    family: Family
    component: str
    size: int  # bytes; 0: not known
    hub: str  # where it comes from


def downloads(project: Project, name: str = "") -> dict[str, Download]:
    """Title -> weights that are missing here and that the stage `name` ("": some stage) needs.

    Raises ValueError for wrong `components`.
    """
    if not project.pipeline.families:
        return {}
    for component in project.config.project.components or {}:
        with suppress(NotFetched):
            project.component(component, fetch=False)
    found = {}
    for stage in [name] if name else project.stage_names:
        for need in project.stage(stage).needs:
            if not isinstance(project.pipeline.resources[need], Weights):
                continue
            family, settings, _ = project.source(need, stage)
            title = need if family is project.family else f"{need} of {family.name}"
            if title in found or family.bundled or family.seeded is not None:
                continue
            sizes = family.component_bytes()
            if (need in sizes or not sizes) and outlook(project, 0, stage).weights(need) is None:
                found[title] = Download(family, need, sizes.get(need, 0), settings.place(need) or family.hub)
    order = list(project.pipeline.resources)
    return dict(sorted(found.items(), key=lambda each: (order.index(each[1].component), each[0])))


def download_writes(project: Project, absent: Iterable[Download]) -> list[tuple[Path, int]]:
    """(folder, bytes) of fetching these components, without what has arrived already."""
    from pipeline.project.weights import cache_folder

    found = []
    by_hub: dict[str, list[Download]] = {}
    for each in absent:
        by_hub.setdefault(each.hub, []).append(each)
    for hub, own in by_hub.items():
        family, fetched = own[0].family, [each.component for each in own]
        places = dict.fromkeys(family.component_bytes(), family.hub)
        if family is project.family:
            places = {part: project.config.project.place(part) or family.hub for part in places}
        here = sum(size for part, size in family.component_bytes().items() if places[part] == hub and part not in fetched)
        arrived = max(0, size_of(cache_folder(hub)) - here)
        found.append((cache_folder(hub), max(0, sum(each.size for each in own) - arrived)))
    return found


def licence_note(project: Project, name: str = "") -> str:
    """A line about the licence of what the stage `name` ("": some stage) will download, "" if that is nothing or free."""
    return next((each.family.terms for each in downloads(project, name).values() if each.hub == each.family.hub), "")


def require_trainable(project: Project, name: str = "") -> None:
    """Raise ValueError if the stage `name` leads to training, "" for all, and the family is not to be trained on."""
    for each in project.stage_names if project.pipeline.families else ():
        if runs.trains(project.stage(each).writes) and name in ("", each, *project.pipeline.upstream(each)):
            config = project.config.sections[each]
            assisted = not all(entry.drawn for entry in getattr(config, "beneath", ()))
            if not assisted and not getattr(config, "allow_distilled", False):
                project.family.require_trainable()


def require_download_room(project: Project, name: str) -> None:
    """Raise DiskError, before weights are downloaded for a stage, if they and what it writes then do not fit on the disk."""
    lacking = [each for each in downloads(project, name).values() if each.size]
    if not lacking:
        return
    try:
        found = forecast(project, name)
    except ValueError:  # the stage reports it
        return
    own = found.row_bytes * (found.rows or 0) + found.file_bytes if found else 0
    require_room(name, [*download_writes(project, lacking), (project.path / "tables", own)])
