"""`latentmill status`: shows which tables are built, and what the next run would do."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click

from pipeline.options import JSON, give_json, with_project
from pipeline.project.project import Project
from pipeline.store.disk import format_bytes
from pipeline.terminal import format_table, tell


@click.command("status")
@click.option(
    "--long",
    "more",
    is_flag=True,
    help="Also show each table's recipe, rows that `latentmill clean` would delete, and peak memory.",
)
@JSON
@with_project
def command(more: bool, as_json: bool, project: Project) -> None:
    """Show the state of every table, what the next run would do, and every training run. Nothing is written."""
    if as_json:
        give_json([asdict(each) | {"state": describe(each)} for each in states(project)])
    else:
        tell(render(project, more))


@dataclass
class TableState:
    """A table under the present settings. A row is wanted if the next run would keep or compute it."""

    stage_name: str
    recipe: str = "-"  # 12 hex digits
    rows: int = 0  # rows that readers see
    missing: int | None = None  # wanted rows that the next run computes; None if it cannot be known yet
    to_do: str = ""  # the same of training, such as "103 steps"
    unpublished: int = 0  # wanted rows that are stored, but not shown to readers before a run finishes
    interrupted: bool = False  # a run has committed rows and did not finish
    usable: bool = False  # it reads a run that was stopped, and could take it as it is
    steps: str = ""  # of a training run, such as "97 of 200 steps": what is stored
    surplus: int = 0  # rows that readers see and that are no longer wanted
    stays: bool = False  # such rows stay in the table, for who asks for other settings
    longer: str = ""  # of training: the run has other steps than are asked for, or has them in checkpoints alone
    again: str = ""  # of training: the steps to compute, if some of them are stored
    then: str = ""  # of training that has a run: what the next one does, as `latentmill plan` knows it
    anew: bool = False  # that is a new run, or perhaps one
    seconds: float | None = None  # that this takes, at the speed of the last run
    unchanged: bool = False  # as `latentmill plan` knows it, whatever the tables that it depends on become
    dead: int = 0  # rows that `latentmill clean` would delete
    nbytes: int = 0  # of all files
    peak: int = 0  # peak memory of the last run, bytes
    writer: str = ""  # the process that is writing the table
    note: str = ""  # why the state is not known, or what the table waits for
    mistake: bool = False  # the note is an error, perhaps only of inputs that are not up to date
    stale_inputs: list[str] = field(default_factory=list)  # tables that it depends on and that are not up to date

    def __str__(self) -> str:
        return f"{self.stage_name}: {_count(self.rows)}, {describe(self)}"


PERHAPS = "a new run if its data change"


def states(project: Project) -> list[TableState]:
    """The state of every table, in the order in which the stages run."""
    stale: dict[str, list[str]] = {}  # table -> the tables among itself and its inputs that are not up to date
    stopped = set[str]()
    found = [state(project, name) for name in project.listed]
    for each in found:
        inputs = project.stage(each.stage_name).reads
        each.stale_inputs = list(dict.fromkeys(name for read in inputs for name in stale[read.name]))
        each.usable = bool(each.missing) and any(read.name in stopped for read in inputs)
        stopped |= {each.stage_name} if each.interrupted else set()
        if each.mistake and each.stale_inputs:
            each.note = f"waits for {' and '.join(each.stale_inputs)}"
        waits = settled(each) or describe(each).startswith("waits for")
        stale[each.stage_name] = each.stale_inputs if each.stale_inputs and waits else []
        if not settled(each) and not stale[each.stage_name]:
            stale[each.stage_name] = [each.stage_name]
    foresee(project, found)
    return found


def foresee(project: Project, found: list[TableState]) -> None:
    """Ask the plan what cannot be told from the tables as they are: those that a table depends on will be others."""
    from pipeline.project.outlook import ANEW, FEW, PERHAPS_ANEW, needs, outlook
    from pipeline.project.runs import find_runs

    begun = {run.stage for run in find_runs(project)}
    training = [each for each in found if each.stage_name in begun and not each.writer and describe(each) != "up to date"]
    # Not while a stage runs: the page asks every second.
    others = [] if any(each.writer for each in found) else [each for each in found if each.stale_inputs and each.missing == 0]
    if not training and not others:
        return
    with suppress(ValueError, OSError):
        plan = {need.stage_name: need for need in needs(project, outlook(project), most=FEW)}
        for each in found:
            need = plan[each.stage_name]
            each.unchanged = need.unchanged and need.table == each.recipe
        for each in training:
            need = plan[each.stage_name]
            each.seconds, each.anew = need.seconds, need.note in (ANEW, PERHAPS_ANEW)
            known = {ANEW: f"a new run of {need.to_do}", PERHAPS_ANEW: PERHAPS}
            each.then = known.get(need.note, f"{need.to_do} of {need.note}" if need.earlier and need.missing else need.note)


def state(project: Project, stage_name: str) -> TableState:
    """The state of one table; loads no weights. Leaves `stale_inputs` empty, which `states` fills."""
    from pipeline.errors import NotBuilt, one_line
    from pipeline.project.outlook import amount, counted, repeated, taken_back
    from pipeline.project.recipe import recipe_id
    from pipeline.project.runs import trains
    from pipeline.project.weights import NotFetched
    from pipeline.store.lock import lock_holder
    from pipeline.store.rows import missing

    found = TableState(stage_name)
    try:
        stage = project.stage(stage_name)
        found.recipe = recipe_id(project.recipe(stage_name))
        folder = project.current(stage_name)
        found.writer = lock_holder(folder.folder / "lock")
        usage = folder.usage()
        found.rows, found.dead, found.nbytes = usage["rows"], usage["dead"], usage["bytes"]
        committed = folder.committed()
        found.interrupted = bool(committed["live"].null_count)
        stored = committed.select(folder.schema.stored.names).cast(folder.schema.stored)
        published = folder.rows() if folder.exists else stored.slice(0, 0)
        run = project.open(stage.name, artifacts=folder.folder / "artifacts", stored=stored)
        wanted = stage.wants(run)
        absent = missing(wanted, stored)
        run.output.pending = absent
        coming = stage.computes(run, wanted) if stage.computes else absent
        found.missing = coming.num_rows
        if trains(stage.writes):
            total = counted(stage, wanted)
            found.steps = f"{total - counted(stage, coming)} of {amount(stage, total)}"
            found.to_do = amount(stage, counted(stage, coming))
            found.again = repeated(stage, run.config, coming, absent)
        found.unpublished = max(0, missing(wanted, published).num_rows - max(absent.num_rows, found.missing))
        found.stays = stage.writes.retains_dead_rows or bool(stage.writes.tensors)
        found.surplus = missing(published.select(wanted.column_names), wanted).num_rows
        if trains(stage.writes):
            found.longer = taken_back(stage, folder, wanted, coming, absent)
        if folder.exists:
            facts = folder.manifest().get("facts", {}).get("run", {})
            found.interrupted |= bool(facts.get("left") and absent.num_rows)
            found.peak = facts.get("footprint", facts.get("peak_rss", 0))
    except NotBuilt as error:
        found.note = f"waits for {error.table}"
    except NotFetched:
        found.note = f"not built, weights are missing: make {stage_name}"
    except (ValueError, OSError) as error:  # OSError: an input file was deleted during the call
        found.note, found.mistake = one_line(error), True
    return found


def settled(found: TableState) -> bool:
    return describe(found).startswith("up to date")


def describe(found: TableState) -> str:
    missing = found.missing or 0
    stored = f"{found.steps or f'{found.unpublished} of {found.unpublished + missing} rows'} are saved"
    if found.writer:
        return f"{stored}; being written by {found.writer}" if found.interrupted else f"being written by {found.writer}"
    stale = f"waits for {' and '.join(found.stale_inputs)}"
    stale += f"; with what there is: latentmill {found.stage_name} --only" if found.usable else ""
    if found.then and (found.note or found.stale_inputs):
        return f"{found.note or stale}; then {found.then}"
    if found.anew:
        return f"{found.then}: make {found.stage_name}"
    if found.note:
        return found.note
    if found.stale_inputs and (missing or found.longer) and not found.interrupted:
        return stale
    if found.longer:
        what = f"{found.again}: make {found.stage_name}" if found.again else f"make {found.stage_name} takes them back"
        return f"{found.longer}: {what}"
    if missing or found.unpublished or found.surplus:
        if found.interrupted:
            reasons = [f"interrupted: {stored}"]
        else:
            reasons = [f"{found.to_do or _count(missing)} missing"] if missing and not found.again else []
            reasons += [f"{_count(found.unpublished)} wanted again"] if found.unpublished else []
        reasons += [found.again] if found.again else []
        reasons += [f"{_count(found.surplus)} {'of before' if found.stays else 'not used any more'}"] if found.surplus else []
        return f"{', '.join(reasons)}: make {found.stage_name}"
    return stale if found.stale_inputs and not found.unchanged else "up to date"


def _count(rows: int) -> str:
    return f"{rows} row{'' if rows == 1 else 's'}"


def render(project: Project, more: bool = False) -> str:
    from pipeline.commands.runs import list_runs

    family = f"family {project.family.name}, " if project.pipeline.families else ""
    rows = [
        {
            "table": each.stage_name,
            "recipe": each.recipe,
            "rows": each.rows,
            "to clean": each.dead,
            "size": format_bytes(each.nbytes),
            "peak": format_bytes(each.peak) if each.peak else None,
            "state": describe(each),
        }
        for each in states(project)
    ]
    names = [name for name in rows[0] if more or name not in ("recipe", "to clean", "peak")]
    table = format_table(names, [[row[name] for name in names] for row in rows], right=("size", "peak"))
    path = project.path
    with suppress(ValueError):
        path = path.resolve().relative_to(Path.cwd())
    runs = list_runs(project)
    return f"{project.name}: {family}{path}\n{table}" + (f"\n\n{runs}" if runs else "")
