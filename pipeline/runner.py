"""Runs one stage: the stage says which rows it wants, computes those that are missing, and the runner commits them."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from pipeline import ranks, workers
from pipeline.errors import Stopped
from pipeline.interrupts import interruptible
from pipeline.machine import peak_rss
from pipeline.project import runs
from pipeline.project.outlook import announcement
from pipeline.project.project import Project
from pipeline.project.recipe import recipe_id
from pipeline.store.catalog import link_table
from pipeline.store.rows import matches, missing
from pipeline.store.writer import Writer
from pipeline.tracking.tracker import tracked
from stages.stage import Artifact, Stage, StageContext

if TYPE_CHECKING:
    from stages.tuner.blockwise.meter import Meter

VERSIONS = ("latentmill", "mlx", "numpy", "pyarrow", "pylance", "pillow", "transformers")


class Console(Protocol):
    """An object that shows the messages and the progress of a running stage to the user."""

    def say(self, line: str) -> None:
        """Show one line of text."""

    def note(self, text: str) -> None:
        """Show facts beside the progress, such as the loss. Each text replaces the one before."""

    def progress(self, done: int, total: int, unit: str) -> None:
        """Show that `done` of `total` items are finished. `unit` names the items in the plural, for example "images"."""


Computed = Iterator[pa.RecordBatch | Artifact]  # batches of the stage's table, and files that their rows name


@dataclass
class Outcome:
    """A report of one run of a stage. `stage_name` is the name of the stage and of its table. Four fields count rows.
    `written`: those that the run wrote. `removed`: those that are no longer wanted. `rows`: those that are wanted.
    `left`: those still to compute, if the stage chose to end early. `reason` then says why. `seconds` is the duration.
    `peak_rss` and `peak_mlx` are the peak memory of the process and of MLX, in bytes.
    """

    stage_name: str
    written: int = 0
    removed: int = 0  # rows that are no longer wanted
    rows: int = 0  # rows that are wanted
    seconds: float = 0.0
    peak_rss: int = 0  # largest resident size of the process, bytes
    peak_mlx: int = 0  # largest active memory of MLX, bytes; 0 if MLX was not loaded
    left: int = 0  # rows still to compute, if the stage ended early of its own accord
    reason: str = ""  # why it ended early

    @property
    def up_to_date(self) -> bool:
        """True if this run of a stage had nothing to do. It then wrote no row and removed no row, and no row is left to
        compute.
        """
        return not self.written and not self.removed and not self.left


def run(
    project: Project,
    name: str,
    console: Console,
    meter: Meter | None = None,
    compute: Callable[[StageContext], Computed] | None = None,
    run_name: str = "",
) -> Outcome:
    """Run the stage `name` of `project`, the opened project folder, and return a report. Compute and store the rows
    that its table lacks, and publish the table. Messages and progress go to `console`. `meter` measures MLX's memory
    while each batch is computed; None measures nothing. `compute(ctx)` replaces the stage's own `run`; None uses that.
    `run_name` becomes the name of the run if the stage trains; "" changes no name. Raises Stopped if the user
    interrupts, and ValueError for mistakes that the user can correct.

    `compute(ctx)` must yield record batches and artifacts for the rows in `ctx.pending`. A rank other than 0
    (`pipeline.ranks`) only computes.
    """
    stage = project.stage(name)
    if ranks.following():
        ranks.follow(project, stage)
        return Outcome(name)
    runs.check_resumable(project, name)
    folder = project.current(name)
    notes = list(runs.news(project, name)) if runs.trains(stage.writes) else []
    warnings.filterwarnings("ignore", module="PIL")  # Pillow's warnings are either in the row or harmless
    began = time.monotonic()
    reasons: list[str] = []
    with (
        interruptible(console.say) as stop,
        Writer(folder, project.recipe(name), flush_seconds=project.config.project.commit_seconds) as writer,
        tracked(project, name, writer, console.say) as follow,
    ):
        ctx = _context(project, stage, writer, console, stop, reasons)
        wanted = stage.wants(ctx)
        ctx.pending = pending_rows(stage, ctx, wanted)
        _begin(project, stage, ctx, run_name, notes)
        published = folder.rows().select(wanted.column_names) if folder.exists else wanted.slice(0, 0)
        commit(follow((compute or workers.computation(project, name))(ctx)), stage, writer, meter)
        wanted = _finish(stage, ctx, writer, wanted)
        written, left = writer.rows_written, missing(wanted, writer.stored).num_rows
        if left and stop.is_set():
            raise Stopped(f"{name}: stopped; {written} new rows are kept, {left} are still to do. Run the same command to go on.")
        assert not left or reasons, f"{name}: {left} rows that the stage wants were never yielded"
        outcome = Outcome(name, written, 0, wanted.num_rows, time.monotonic() - began, peak_rss(), peak_mlx(meter))
        if left:
            outcome.left, outcome.reason = left, reasons[-1]
        else:
            outcome.removed = missing(published, wanted).num_rows
        writer.finish(wanted, facts_of(outcome) if written or left or not folder.exists else {})
        link_table(folder)
    return outcome


def _begin(project: Project, stage: Stage, ctx: StageContext, run_name: str, notes: Iterable[str]) -> None:
    """Announce a run of `stage` to the user, and record its beginning if the stage trains. `project` is the opened
    project folder. `ctx` is the stage's context, with the rows to compute. The user gets the lines `notes`. If rows are
    to be computed, one more line says what the run will need. `run_name` is the name that the user gave the run, or "".
    """
    if runs.trains(stage.writes) and (ctx.pending.num_rows or run_name):
        runs.begin(project, stage.name, software(), run_name)
    for note in notes:
        ctx.say(note)
    if ctx.pending.num_rows and (line := announcement(project, stage.name, ctx.pending.num_rows)):
        ctx.say(line)


def _finish(stage: Stage, ctx: StageContext, writer: Writer, wanted: pa.Table) -> pa.Table:
    """Commit the last rows of a run of `stage`, and return the rows that the stage's table should have at the end of
    the run. The function `stage.finish(ctx)` yields the last rows. `ctx` is the stage's context. `writer` commits the
    rows. `wanted` holds the rows that `stage.wants(ctx)` returned at the start of the run. If all rows of `wanted` are
    stored now, `wanted` is returned. Otherwise, `stage.wants(ctx)` is called again, and its new result is returned.

    For example, early stopping has ended a training run. The new result then has fewer rows than `wanted`. If
    `stage.finish` is None, there are no last rows to commit.
    """
    ctx.stored = writer.stored
    if stage.finish:
        commit(stage.finish(ctx), stage, writer)
    if not missing(wanted, writer.stored).num_rows:
        return wanted
    ctx.stored = writer.stored
    return stage.wants(ctx)


def repair(project: Project, name: str, console: Console) -> None:
    """Run the `repair` function of the stage `name` of `project`, the opened project folder. It writes damaged
    artifacts again, such as the checkpoints of a training run. Its messages for the user go to `console`. Nothing
    happens if the stage has no such function or if no run of it has finished.

    Artifacts that rows name are not repaired here. A run of the stage computes their rows again.
    """
    stage, folder = project.stage(name), project.current(name)
    if stage.repair is None or not folder.exists:
        return
    with interruptible() as stop, Writer(folder, project.recipe(name)) as writer:
        for line in stage.repair(_context(project, stage, writer, console, stop, [])):
            console.say(line)


def _context(
    project: Project, stage: Stage, writer: Writer, console: Console, stop: threading.Event, reasons: list[str]
) -> StageContext:
    """Return the context that the functions of `stage` get in this run. `project` is the opened project folder. The
    context writes artifacts through `writer` and reports to `console`. `stop` is set when the user asks to stop. If the
    stage ends early, it adds the reason to the list `reasons`.
    """
    return project.context(
        stage,
        artifacts=writer.table.folder / "artifacts",
        stored=writer.stored,
        write_artifact=writer.write_artifact,
        say=console.say,
        progress=console.progress,
        note=console.note,
        stop=stop.is_set,
        pause=reasons.append,
        provenance=provenance(project, stage.name),
    )


def pending_rows(stage: Stage, ctx: StageContext, wanted: pa.Table) -> pa.Table:
    """Return the rows of `wanted` that must be computed now. First come the rows that the stage's table (`ctx.stored`) lacks.
    Then come the stored rows that `stage.redo` asks to compute again.
    """
    absent = missing(wanted, ctx.stored)
    if stage.redo is None:
        return absent
    again = stage.redo(ctx).select(wanted.column_names).cast(wanted.schema)
    return pa.concat_tables([absent, again.filter(pc.invert(matches(again, absent, list(stage.writes.key))))])


def commit(batches: Iterable[pa.RecordBatch | Artifact], stage: Stage, writer: Writer, meter: Meter | None = None) -> None:
    """Write `batches` to the stage's table through `writer`, and commit them. `batches` are record batches of rows, and
    artifacts (files that rows name). If `meter` is given, it measures MLX's memory while each batch is computed. If computing
    fails, the rows before the failure are still committed. At the end MLX's cache is released.
    """
    try:
        for item in meter.measure_each(batches, stage.name) if meter else batches:
            if isinstance(item, Artifact):
                writer.write_artifact(item.name, functools.partial(_write_bytes, content=item.content))
            else:
                writer.append(item)
    finally:
        if isinstance(batches, Generator):
            batches.close()
        writer.flush()
        if "mlx.core" in sys.modules:
            sys.modules["mlx.core"].clear_cache()


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def provenance(project: Project, stage_name: str) -> dict[str, str]:
    """Return the metadata that the stage `stage_name` writes into its files, as a dict from name to text. It names the
    project, the model family and the versions of the software. It also holds the recipe ids (hashes of settings and
    weights) of the stage's table and of each table that it reads. `project` is the opened project folder.
    """
    reads = {f"recipe_{read.name}": recipe_id(project.recipe(read.name)) for read in project.stage(stage_name).reads}
    versions = {f"version_{name}": version for name, version in software().items()}
    family = {"family": project.family.name} if project.pipeline.families else {}
    return {**family, "project": project.name, "recipe": recipe_id(project.recipe(stage_name)), **reads, **versions}


def software() -> dict[str, str]:
    """Return the versions of Python, the operating system and the packages in VERSIONS: name -> version. Packages that are not
    installed are left out.
    """
    versions = {name: version for name in VERSIONS if (version := _version(name))}
    return {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}", **versions}


@functools.cache
def _version(package: str) -> str:
    """Return the version of an installed package; empty if it is not installed. It is read from disk once."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def facts_of(outcome: Outcome) -> dict[str, Any]:
    """Return the facts about a run that the table's manifest records, as a dict. `outcome` is the report of the run.
    "run" holds the rows written, the duration in seconds, and the peak memory in bytes. "versions" holds the versions
    of the software.
    """
    return {
        "run": {
            "rows_written": outcome.written,
            "seconds": round(outcome.seconds, 3),
            "peak_rss": outcome.peak_rss,
            "peak_mlx": outcome.peak_mlx,
        },
        "versions": software(),
    }


def peak_mlx(meter: Meter | None = None) -> int:
    """Return the peak active memory of MLX in this process, in bytes. Return 0 if MLX was never imported. `meter` is
    the `Meter` that measured this process, or None.

    A meter resets the peak that MLX records. The result is the larger of the meter's peak and that of MLX.
    """
    core = sys.modules.get("mlx.core")
    return max(int(core.get_peak_memory()), meter.peak if meter else 0) if core else 0
