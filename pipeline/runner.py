"""Runs one stage: asks what is wanted, lets the stage make what is missing, commits it, and writes the manifest last."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import platform
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import Stopped
from pipeline.project.project import Project
from pipeline.store.rows import matches, missing
from pipeline.store.writer import Writer
from stages.stage import Artifact, Stage, StageContext

if TYPE_CHECKING:
    from stages.tuner.blockwise.meter import Meter

VERSIONS = ("latentmill", "mlx", "numpy", "pyarrow", "pylance", "pillow", "transformers")


class Console(Protocol):
    """Where a stage's lines and its progress go."""

    def say(self, line: str) -> None:
        """One line."""

    def progress(self, done: int, total: int, unit: str) -> None:
        """Move the bar."""


@dataclass
class Outcome:
    """What a run did."""

    stage_name: str
    written: int = 0
    removed: int = 0
    rows: int = 0
    seconds: float = 0.0
    peak_rss: int = 0  # bytes, the process's largest resident size
    peak_mlx: int = 0  # bytes, MLX's largest active memory; 0 where MLX was not needed
    facts: dict[str, Any] = field(default_factory=dict)
    left: int = 0  # rows still to do, where the stage ended early of its own accord
    reason: str = ""  # why it did

    @property
    def up_to_date(self) -> bool:
        """Nothing was written and nothing went."""
        return not self.written and not self.removed and not self.left


def run(project: Project, name: str, console: Console, meter: Meter | None = None) -> Outcome:
    """Bring the table of one stage up to date and return what was done.

    Stopped if the user interrupts; ValueError, in one line, for what the user can correct. With a `meter`, MLX's memory is
    measured batch by batch.
    """
    stage = project.stage(name)
    warnings.filterwarnings("ignore", module="PIL")  # what Pillow warns of is a row's reason, or harmless
    began = time.monotonic()
    folder = project.current(name)
    reasons: list[str] = []
    with (
        interruptible() as stop,
        Writer(folder, project.recipe(name), flush_seconds=project.config.project.commit_seconds) as writer,
    ):
        ctx = project.context(
            stage,
            artifacts=folder.folder / "artifacts",
            stored=writer.stored,
            write_artifact=writer.write_artifact,
            say=console.say,
            progress=console.progress,
            stop=stop.is_set,
            pause=reasons.append,
            provenance=provenance(project, name),
        )
        wanted = stage.wants(ctx)
        ctx.pending = pending_rows(stage, ctx, wanted)
        before = folder.rows().select(wanted.column_names) if folder.exists else None
        written = commit(stage.run(ctx), stage, writer, meter)
        ctx.stored = writer.stored
        if stage.finish:
            written += commit(stage.finish(ctx), stage, writer)
            ctx.stored = writer.stored
        left = missing(wanted, writer.stored).num_rows
        if left:  # a run may shorten what it wants: training ends early when validation stops improving
            wanted = stage.wants(ctx)
            left = missing(wanted, writer.stored).num_rows
        if left and stop.is_set():
            raise Stopped(f"{name}: stopped; {written} new rows are kept, {left} are still to do. Run the same command to go on.")
        outcome = Outcome(name, written, 0, wanted.num_rows, time.monotonic() - began, peak_rss(), peak_mlx(meter))
        if left and reasons:
            writer.finish(wanted, facts_of(outcome))  # the rows so far can be queried, and previewed
            return dataclasses.replace(outcome, left=left, reason=reasons[-1])
        assert not left, f"{name}: {left} rows that the stage wants were never yielded"
        removed = missing(before, wanted).num_rows if before is not None else 0
        outcome = dataclasses.replace(outcome, removed=removed)
        writer.finish(wanted, facts_of(outcome) if written or not folder.exists else {})
    return outcome


def pending_rows(stage: Stage, ctx: StageContext, wanted: pa.Table) -> pa.Table:
    """The wanted rows that are not stored, and those stored rows that the stage wants to compute again."""
    absent = missing(wanted, ctx.stored)
    if stage.redo is None:
        return absent
    again = stage.redo(ctx).select(wanted.column_names).cast(wanted.schema)
    return pa.concat_tables([absent, again.filter(pc.invert(matches(again, absent, list(stage.writes.key))))])


def commit(batches: Iterable[pa.RecordBatch | Artifact], stage: Stage, writer: Writer, meter: Meter | None = None) -> int:
    """Commit what a stage or a work unit yields, then release MLX's cache. Returns the number of rows written."""
    written = 0
    try:
        for made in meter.measure_each(batches, stage.name) if meter else batches:
            if isinstance(made, Artifact):
                writer.write_artifact(made.name, functools.partial(_write_bytes, content=made.content))
            else:
                writer.append(made)
                written += made.num_rows
    finally:
        if isinstance(batches, Generator):
            batches.close()
        writer.flush()
        if "mlx.core" in sys.modules:
            sys.modules["mlx.core"].clear_cache()
    return written


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """The first Ctrl-C (or SIGTERM) asks the stage to stop after its batch; a second one interrupts at once."""
    stop = threading.Event()

    def ask(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def provenance(project: Project, stage_name: str) -> dict[str, str]:
    """What a file made by this run says of its making: family, recipe, the recipes of the tables it read, versions."""
    from pipeline.project.recipe import short

    reads = {f"recipe_{read.name}": short(project.recipe(read.name)) for read in project.stage(stage_name).reads}
    versions = {f"version_{name}": version for name, version in software().items()}
    family = {"family": project.family.name} if project.pipeline.families else {}
    return {**family, "project": project.name, "recipe": short(project.recipe(stage_name)), **reads, **versions}


def software() -> dict[str, str]:
    """Versions of what made a table."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def facts_of(outcome: Outcome) -> dict[str, Any]:
    """What the manifest keeps of the run that last wrote."""
    return {
        "run": {
            "rows_written": outcome.written,
            "seconds": round(outcome.seconds, 3),
            "peak_rss": outcome.peak_rss,
            "peak_mlx": outcome.peak_mlx,
        },
        "versions": software(),
    }


def peak_rss() -> int:
    """The process's peak resident memory, bytes (Linux counts in KiB, macOS in bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_mlx(meter: Meter | None = None) -> int:
    """MLX's peak active memory, bytes; 0 if nothing needed MLX. A meter sets MLX's own back, and has the largest."""
    core = sys.modules.get("mlx.core")
    return max(int(core.get_peak_memory()), meter.peak if meter else 0) if core else 0
