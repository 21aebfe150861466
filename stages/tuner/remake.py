"""Restore damaged checkpoints, by training again from the checkpoint before them with the same samples."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from stages.hashing import file_sha256
from stages.run import Run
from stages.tuner import checkpoint
from stages.tuner.adapters.targets import adapter_metadata
from stages.tuner.blockwise.device import configure_scheduler
from stages.tuner.checkpoint import ADAPTER, Checkpoint
from stages.tuner.loader import Loader
from stages.tuner.loop import load_training
from stages.tuner.replay import checkpoint_before, recorded_plan
from stages.tuner.rows import rows_table
from stages.tuner.task import Row, Task
from stages.tuner.validation import TRAIN


def remake_checkpoints(run: Run[Any], task: Task[Any, Any]) -> Iterator[str]:
    for step, problem in sorted(checkpoint.damaged_checkpoints(run.output.artifacts).items()):
        folder = run.output.artifacts / checkpoint.FOLDER / f"step-{step:06d}"
        with tempfile.TemporaryDirectory(prefix="latentmill-") as temporary:
            made = _train_to(run, task, step, partial(_write_below, Path(temporary)))
            expected = _recorded_adapter(run.output.artifacts, step)
            # Another machine rounds differently, and must not replace what the rows of the run belong to.
            if expected not in ("", made.state["files"][ADAPTER]["sha256"]):
                yield f"the checkpoint of step {step} cannot be made again: training gives other values ({problem})"
                continue
            for name in (*made.state["files"], checkpoint.STATE):
                run.output.write(f"{checkpoint.FOLDER}/{folder.name}/{name}", partial(shutil.copyfile, made.folder / name))
        yield f"the checkpoint of step {step} was made again"
    saved = checkpoint.find_checkpoints(run.output.artifacts)
    if saved:
        checkpoint.prune(run.output.artifacts, saved[0].step, task.config.keep_states)


def _train_to(run: Run[Any], task: Task[Any, Any], step: int, write: checkpoint.WriteArtifact) -> Checkpoint:
    checkpoints = checkpoint.find_checkpoints(run.output.artifacts)
    start = checkpoint_before(checkpoints, step)
    configure_scheduler()  # before the first MLX operation
    plan = recorded_plan(run, task, start or (checkpoints[-1] if checkpoints else None), start)
    training, schedule = load_training(task, start, plan), task.config.learning_rate()
    skipped = start.state["skipped"] if start else 0
    for at, batches, _ in Loader(task, range(start.step + 1 if start else 1, step + 1)):
        result = training.step(batches, schedule.at(at))
        skipped = 0 if result.finite else skipped + 1
        run.report.progress(at, step, "steps")
    before = max((saved.step for saved in checkpoints if saved.step < step), default=-1)
    rows: list[Row] = [row for row in run.output.stored.to_pylist() if before < row["step"] <= step]
    # As a run writes them: the samples of a step, then its measurement.
    rows.sort(key=lambda row: (row["step"], row["split"] != TRAIN, row["sample"]))
    facts = {"skipped": skipped, "plan": training.memory.plan, "max_tokens": training.memory.max_tokens}
    table = rows_table(task.schema, rows)
    metadata = _recorded_metadata(checkpoints) or {**run.output.provenance, **task.metadata, **adapter_metadata(training.targets)}
    return checkpoint.save(write, step, training.adapter, training.state, table, metadata, facts, training.average)


def _recorded_metadata(checkpoints: list[Checkpoint]) -> dict[str, str]:
    # As the run wrote it: the present recipe and versions may differ.
    for saved in checkpoints:
        if saved.intact(ADAPTER):
            return {key: value for key, value in checkpoint.header_metadata(saved.folder / ADAPTER).items() if key != "step"}
    return {}


def _recorded_adapter(artifacts: Path, step: int) -> str:
    for saved in checkpoint.find_checkpoints(artifacts):
        if saved.step == step:
            return str(saved.state["files"][ADAPTER]["sha256"])
    # state.json is gone: the adapter itself, or its published copy.
    for path in (artifacts / checkpoint.FOLDER / f"step-{step:06d}" / ADAPTER, artifacts / ADAPTER):
        if path.is_file() and checkpoint.header_step(path) == step:
            return file_sha256(path)
    return ""


def _write_below(folder: Path, name: str, write: Callable[[Path], None]) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path)
    return path
