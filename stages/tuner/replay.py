"""Steps of a run, trained again from the checkpoint before them: to replay one, and to restore damaged checkpoints.

On the machine that trained the run, the losses equal those in the run's table to the bit.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from stages.hashing import file_sha256
from stages.run import Run
from stages.tuner import checkpoint
from stages.tuner.blockwise.device import configure_scheduler
from stages.tuner.checkpoint import ADAPTER, OPTIMIZER, Checkpoint, find_checkpoints
from stages.tuner.loop import Loader, load_training, rows_table, save_checkpoint
from stages.tuner.memory import choose_plan
from stages.tuner.step import StepResult, TrainingStep
from stages.tuner.task import MicroBatch, Row, Task
from stages.tuner.validation import TRAIN


@dataclass(frozen=True)
class ReplayedSample:
    number: int  # index in the step
    sample: Any
    loss: float  # computed now
    logged: float | None  # in the table of the run; None: no such row


def replay_step(run: Run[Any], task: Task[Any, Any], step: int) -> list[ReplayedSample]:
    """Losses of a step, computed again from the newest checkpoint before it. Raises ValueError if the run has no such step."""
    if not 1 <= step <= task.config.steps:
        raise ValueError(f"replay: the step must be 1 to {task.config.steps}, got {step}")
    samples: list[Any] = []
    losses: list[float] = []
    for _, batches, result in steps_again(run, task, step, checkpoint_before(run, step)):
        samples, losses = [sample for batch in batches for sample in batch.samples], result.losses
    rows = run.output.stored.select(["step", "split", "sample", "loss"]).to_pylist()
    logged = {row["sample"]: row["loss"] for row in rows if (row["step"], row["split"]) == (step, TRAIN)}
    return [ReplayedSample(n, sample, loss, logged.get(n)) for n, (sample, loss) in enumerate(zip(samples, losses, strict=True))]


def checkpoint_before(run: Run[Any], step: int) -> Checkpoint | None:
    earlier = (saved for saved in find_checkpoints(run.output.artifacts) if saved.step < step)
    return next((saved for saved in earlier if saved.intact(ADAPTER, OPTIMIZER)), None)


def steps_again(
    run: Run[Any], task: Task[Any, Any], last: int, start: Checkpoint | None
) -> Iterator[tuple[TrainingStep, list[MicroBatch], StepResult]]:
    configure_scheduler()  # before the first MLX operation
    # All checkpoints record the plan of the run, but its micro-batch changes, and only that of `start` is right.
    known = start or next(reversed(find_checkpoints(run.output.artifacts)), None)
    tokens = start.state.get("max_tokens") if start else None
    known = known and replace(known, state={**known.state, "max_tokens": tokens})
    plan = choose_plan(task.estimator(), known, run.report.say, recorded=known is not None)
    plan = replace(plan, max_tokens=tokens) if start else plan
    training, schedule = load_training(task, start, plan), task.config.learning_rate()
    for step, batches, _ in Loader(task, range(start.step + 1 if start else 1, last + 1)):
        result = training.step(batches, schedule.at(step))
        training.adjust_micro_batch(result.largest_tokens)
        run.report.progress(step, last, "steps")
        yield training, batches, result


def remake_checkpoints(run: Run[Any], task: Task[Any, Any]) -> Iterator[str]:
    artifacts = run.output.artifacts
    for step, problem in sorted(checkpoint.damaged_checkpoints(artifacts).items()):
        with tempfile.TemporaryDirectory(prefix="latentmill-") as temporary:
            made = _train_to(run, task, step, partial(_write_below, Path(temporary)))
            expected = _recorded_adapter(artifacts, step)
            # Another machine rounds differently, and must not replace what the rows of the run belong to.
            if expected not in ("", made.state["files"][ADAPTER]["sha256"]):
                yield f"the checkpoint of step {step} cannot be made again: training gives other values ({problem})"
                continue
            for name in (*made.state["files"], checkpoint.STATE):
                run.output.write(f"{checkpoint.folder_name(step)}/{name}", partial(shutil.copyfile, made.folder / name))
        yield f"the checkpoint of step {step} was made again"
    saved = find_checkpoints(artifacts)
    if saved:
        checkpoint.prune(artifacts, saved[0].step, task.config.keep_states)


def _train_to(run: Run[Any], task: Task[Any, Any], step: int, write: checkpoint.WriteArtifact) -> Checkpoint:
    checkpoints, start = find_checkpoints(run.output.artifacts), checkpoint_before(run, step)
    skipped = start.state["skipped"] if start else 0
    for training, _, result in steps_again(run, task, step, start):  # noqa: B007  (the last one is saved)
        skipped = 0 if result.finite else skipped + 1
    before = max((saved.step for saved in checkpoints if saved.step < step), default=-1)
    rows: list[Row] = [row for row in run.output.stored.to_pylist() if before < row["step"] <= step]
    # As a run writes them: the samples of a step, then its measurement.
    rows.sort(key=lambda row: (row["step"], row["split"] != TRAIN, row["sample"]))
    # As the run wrote them: the present recipe, versions and number of ranks may differ.
    header = next((checkpoint.header_metadata(saved.folder / ADAPTER) for saved in checkpoints if saved.intact(ADAPTER)), {})
    metadata = {key: value for key, value in header.items() if key != "step"}
    recorded = next((saved.state for saved in checkpoints if saved.step == step), {})
    facts = {key: recorded[key] for key in ("timed", "stopped", "ranks") if key in recorded}
    return save_checkpoint(run, task, training, step, skipped, rows_table(task.schema, rows), facts, metadata or None, write)


def _recorded_adapter(artifacts: Path, step: int) -> str:
    for saved in find_checkpoints(artifacts):
        if saved.step == step:
            return str(saved.state["files"][ADAPTER]["sha256"])
    # state.json is gone: the adapter itself, or its published copy.
    for path in (artifacts / checkpoint.folder_name(step) / ADAPTER, artifacts / ADAPTER):
        if path.is_file() and checkpoint.header_step(path) == step:
            return file_sha256(path)
    return ""


def _write_below(folder: Path, name: str, write: Callable[[Path], None]) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path)
    return path
