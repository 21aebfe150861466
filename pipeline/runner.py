"""Runs one stage: the stage says which rows it wants, computes those that are missing, and the runner commits them."""

from __future__ import annotations

import importlib.util
import platform
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline import ranks
from pipeline.errors import Stopped
from pipeline.process import interruptible, own_command, peak_mlx, refuse_fork, version
from pipeline.project import runs
from pipeline.project.outlook import amount, announcement, counted, licence_note, require_download_room, require_trainable
from pipeline.project.project import Project
from pipeline.project.recipe import recipe_id
from pipeline.store.rows import matches, missing
from pipeline.store.table import Writer, link_table
from pipeline.tracking import tracked
from pipeline.work import Item
from stages import footprint
from stages.run import Report, Run
from stages.shortage import budget, free_memory, is_shortage
from stages.stage import Artifact, Stage
from stages.tuner.launched import launched_rank

if TYPE_CHECKING:
    from pipeline.terminal import ProgressCallback, Quiet, Terminal
    from stages.tuner.blockwise.meter import Meter

VERSIONS = ("latentmill", "mlx", "numpy", "pyarrow", "pylance", "pillow", "tokenizers")


@dataclass
class Outcome:
    stage_name: str
    written: int = 0
    removed: int = 0  # rows that are no longer wanted
    rows: int = 0  # rows that are wanted
    seconds: float = 0.0
    peak_rss: int = 0  # largest resident size of the process, bytes
    footprint: int = 0  # most memory of the process as the machine counts it, bytes: on a GPU, the GPU's
    peak_mlx: int = 0  # largest active memory of MLX, bytes; 0 if MLX was not loaded
    left: int = 0  # rows still to compute, if the stage ended early of its own accord
    reason: str = ""  # why it ended early, and what is saved, as a sentence
    done: str = ""  # what was computed, such as "1 picture" or "12 steps"
    restored: str = ""  # what was taken back from artifacts, the same way
    whole: str = ""  # what there is now, the same way
    last: int = 0  # of a run that was longer than is asked for: its last step

    @property
    def up_to_date(self) -> bool:
        return not self.written and not self.removed and not self.left


def run(
    project: Project,
    name: str,
    console: Terminal | Quiet,
    meter: Meter | None = None,
    compute: Callable[[Run[Any]], Iterator[Item]] | None = None,
    run_name: str = "",
) -> Outcome:
    """Compute and store the rows that the table `name` lacks, and publish it. A rank other than 0 only computes.

    `compute(run)` replaces the stage's `run`. Raises Stopped after an interrupt, ValueError for mistakes of the user.
    """
    refuse_fork()
    stage = project.stage(name)
    if launched_rank():  # not 0
        project.fetch = True
        ranks.follow(project, stage)
        return Outcome(name)
    require_trainable(project, name)
    require_download_room(project, name)
    if note := licence_note(project, name):
        console.say(note)
    project.fetch = True  # a run downloads the weights that it lacks
    runs.check_resumable(project, name)
    folder = project.current(name)
    notes = list(runs.news(project, name)) if runs.trains(stage.writes) else []
    warnings.filterwarnings("ignore", module="PIL")  # Pillow's warnings are either in the row or harmless
    began = time.monotonic()
    reasons: list[str] = []  # why the stage ends before all rows are made
    with (
        interruptible(console.say) as stop,
        Writer(folder, project.recipe(name), flush_seconds=project.config.project.commit_seconds) as writer,
        tracked(project, name, writer, console.say) as committed,
        project.kept,
    ):
        run = _open(project, stage, writer, console, stop, reasons)
        wanted = stage.wants(run)
        run.output.pending = pending_rows(stage, run, wanted)
        count = run.output.pending.num_rows
        if runs.trains(stage.writes) and (count or run_name):
            runs.begin(project, name, software(), run_name, counted(stage, wanted))
        coming = stage.computes(run, wanted) if stage.computes else run.output.pending
        back = missing(run.output.pending, coming)
        needed, disk, expected = "", 0, None
        if coming.num_rows:
            needed, disk, expected = announcement(project, name, count, amount(stage, counted(stage, coming)))
        writer.expect(disk)
        for line in filter(None, [*notes, needed]):
            console.say(line)
        published = writer.published.select(wanted.column_names) if folder.exists else wanted.slice(0, 0)
        again = partial(commit, stage=stage, writer=writer, meter=meter, committed=committed)
        if compute or project.config.project.workers != "local" or launched_rank() is not None:
            again(compute(run) if compute else computed(project, stage, run))
        else:
            despite_shortage(stage, run, wanted, writer, again)
        run.output.stored = writer.stored
        if stage.finish:
            commit(stage.finish(run), stage, writer)
            run.output.stored = writer.stored
        absent = missing(run.output.pending, writer.stored)  # what was not pending is there
        if absent.num_rows:
            wanted = stage.wants(run)  # fewer rows now, if early stopping has ended a training run
            absent = missing(wanted, writer.stored)
        written, left, undone = writer.rows_written, absent.num_rows, counted(stage, absent)
        done = max(0, counted(stage, coming) - undone)
        saved = f"{amount(stage, done)} done and saved, {undone} to do. Run the same command to go on."
        stopped = bool(left and stop.is_set())
        assert not left or stopped or reasons, f"{name}: {left} rows that the stage wants were never yielded"
        # A meter resets the peak that MLX records.
        peak = max(peak_mlx(), meter.peak) if meter else peak_mlx()
        sizes = footprint.peak_resident(), footprint.peak(), peak
        outcome = Outcome(name, written, 0, wanted.num_rows, time.monotonic() - began, *sizes)
        outcome.done = amount(stage, done if runs.trains(stage.writes) else written)
        outcome.whole = amount(stage, counted(stage, wanted))
        if back.num_rows:
            outcome.restored = amount(stage, counted(stage, back))
            outcome.done = outcome.done if done else ""
        if left:
            outcome.left, outcome.reason = left, f"{'stopped' if stopped else reasons[-1]}; {saved}"
        else:
            gone = missing(published, wanted)
            outcome.removed = gone.num_rows
            outcome.last = pc.max(gone["step"]).as_py() or 0 if runs.trains(stage.writes) else 0
        # A run that computed nothing leaves the facts of the last one that did: they tell the speed.
        computed_count = max(0, written - back.num_rows)
        facts: dict[str, Any] = {"rows_written": computed_count, "seconds": round(outcome.seconds, 3)}
        facts |= {"peak_rss": outcome.peak_rss, "peak_mlx": peak, "footprint": outcome.footprint}
        facts |= {"size": expected.size if expected else None, "left": left}
        # Of a run that was stopped, the steps so far can be used; of another stage, rows that belong together may be missing.
        uses = [each for each in project.stage_names if stage.writes in project.stage(each).reads]
        uses = uses if runs.trains(stage.writes) and writer.stored.num_rows else []
        if not stopped or uses:
            writer.finish(wanted, {"run": facts, "versions": software()} if computed_count or left or not folder.exists else {})
            link_table(folder)
        if stopped:
            more = f" With what there is: latentmill {uses[0]} --only" if uses else ""
            raise Stopped(f"{name}: {outcome.reason}{more}")
    return outcome


def run_chain(project: Project, names: Sequence[str], progress: ProgressCallback | bool = True) -> Outcome:
    """Run these stages in this process, one after another. What the last one did."""
    from pipeline.terminal import console_for

    for name in names:
        project.refresh()
        with console_for(name, progress) as console:
            outcome = run(project, name, console)
    project.refresh()
    return outcome


def run_words(project: Project, name: str, *more: str) -> list[str]:
    words = [*own_command(), "run", name, *more, "--project", str(project.path.resolve())]
    words += [word for override in project.overrides for word in ("--set", str(override))]
    return [*words, "--run", project.fixed.table.folder.name] if project.fixed else words


def repair(project: Project, name: str, console: Terminal | Quiet) -> None:
    """Let the stage write damaged artifacts again that no row names, such as checkpoints. A run remakes the others."""
    stage, folder = project.stage(name), project.current(name)
    if stage.repair is None or not folder.exists:
        return
    with interruptible() as stop, Writer(folder, project.recipe(name)) as writer:
        for line in stage.repair(_open(project, stage, writer, console, stop, [])):
            console.say(line)


def _open(
    project: Project, stage: Stage, writer: Writer, console: Terminal | Quiet, stop: threading.Event, reasons: list[str]
) -> Run[Any]:
    return project.open(
        stage.name,
        Report(console.say, console.note, console.progress, stop.is_set, reasons.append),
        artifacts=writer.table.folder / "artifacts",
        stored=writer.stored,
        write=writer.write_artifact,
        provenance=provenance(project, stage.name),
    )


def pending_rows(stage: Stage, run: Run[Any], wanted: pa.Table) -> pa.Table:
    """Rows of `wanted` that the table lacks, then stored ones that `stage.redo` asks for again."""
    absent = missing(wanted, run.output.stored)
    if stage.redo is None:
        return absent
    again = stage.redo(run).select(wanted.column_names).cast(wanted.schema)
    return pa.concat_tables([absent, again.filter(pc.invert(matches(again, absent, list(stage.writes.key))))])


def computed(project: Project, stage: Stage, run: Run[Any]) -> Iterator[Item]:
    """Here or on Ray, as [project] `workers` says. Raises ValueError if Ray is not installed."""
    settings = project.config.project
    if settings.workers == "local" or not stage.divisible:
        return stage.run(run)
    if importlib.util.find_spec("ray") is None:
        raise ValueError(f'project.workers = "{settings.workers}" needs Ray; pip install "latentmill[ray]"')
    if not settings.divides(stage.divisible, run.output.pending.num_rows):
        return stage.run(run)
    # The workers do not share the files, and the stage's cannot be sent.
    if settings.worker_inputs == "shipped" and not stage.ships:
        run.report.say("computed here, because its input files cannot be sent to workers (project.worker_inputs)")
        return stage.run(run)
    from pipeline import on_ray

    return on_ray.compute(project, stage.name, run)


def commit(
    items: Iterable[Item],
    stage: Stage,
    writer: Writer,
    meter: Meter | None = None,
    committed: Callable[[], None] = lambda: None,
) -> None:
    """Write and commit items, also those before a failure; `committed` is called after each, when rows may have been."""
    try:
        for item in meter.measure_each(items, stage.name) if meter else items:
            if isinstance(item, Artifact):
                writer.write_artifact(item.name, item.write)
            else:
                writer.append(item)
            committed()
    finally:
        if isinstance(items, Generator):
            items.close()
        writer.flush()
        if "mlx.core" in sys.modules:
            sys.modules["mlx.core"].clear_cache()


def despite_shortage(
    stage: Stage, run: Run[Any], wanted: pa.Table, writer: Writer, commit: Callable[[Iterator[Item]], None]
) -> None:
    """Computes and commits the pending rows. After an allocation failed, those that are left, within the memory that there was.

    Raises the RuntimeError of a failure before which no further row was committed.
    """
    granted, written, begun = None, -1, run.output.pending
    while True:
        try:
            with budget(granted):
                commit(stage.run(run))
            break
        except RuntimeError as error:
            if not is_shortage(error) or writer.rows_written == written:
                raise
            granted, reason = peak_mlx(), " ".join(str(error).split())
        free_memory()
        written = writer.rows_written
        run.output.stored = writer.stored
        run.output.pending = pending_rows(stage, run, wanted)
        run.report.say(f"{stage.name}: not enough memory ({reason}); MLX's cache is freed, and what is left is computed again")
    run.output.pending = begun  # what `stage.finish` is given


def provenance(project: Project, stage_name: str) -> dict[str, str]:
    reads = {f"recipe_{read.name}": recipe_id(project.recipe(read.name)) for read in project.stage(stage_name).reads}
    versions = {f"version_{name}": version for name, version in software().items()}
    family = {"family": project.family_of(stage_name).name} if project.pipeline.families else {}
    return {**family, "project": project.name, "recipe": recipe_id(project.recipe(stage_name)), **reads, **versions}


def software() -> dict[str, str]:
    versions = {name: found for name in VERSIONS if (found := version(name))}
    return {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}", **versions}
