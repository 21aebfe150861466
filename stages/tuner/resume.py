"""The start of a training run: the newest checkpoint that it can resume from, and the rows that only checkpoints hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stages.tuner.checkpoint import OPTIMIZER, ROWS, Checkpoint, find_checkpoints
from stages.tuner.task import TrainingContext
from stages.tuner.validation import VALIDATION

Row = dict[str, Any]
Key = tuple[int, str, int]  # step, split, sample


@dataclass(frozen=True)
class Start:
    """The point from which a run starts or resumes. `checkpoint` is the checkpoint to resume from. If it is None, the
    run starts from the beginning. `recovered` has the rows that the run's table lacks, up to the checkpoint's step.
    They were read from checkpoints.
    """

    checkpoint: Checkpoint | None
    recovered: list[Row]

    @property
    def step(self) -> int:
        """The number of training steps that are already done. It is the step of `checkpoint`, or 0 if there is none."""
        return self.checkpoint.step if self.checkpoint else 0


def row_key(row: Row) -> Key:
    """Return the key (step, split, sample) of a row of a training run. The split is "train" or "validation"."""
    return row["step"], row["split"], row["sample"]


def find_start(ctx: TrainingContext, last: int) -> Start:
    """Return the point from which a training run resumes. It is the newest intact checkpoint in the folder
    `ctx.artifacts`. A checkpoint is skipped if rows up to its step are lost, or if it is after step `last`, the run's
    last step. If no checkpoint can be used, the run starts from the beginning.

    A checkpoint is usable if its files are intact and all rows up to its step still exist. A row exists if the run's
    table or an intact checkpoint holds it. Rows of the measurement at the checkpoint's step may be missing, because
    this measurement is repeated. The user is told if a newer checkpoint is skipped. The user is also told if a run with
    stored rows starts from the beginning.
    """
    pending = {row_key(row) for row in ctx.pending.to_pylist()}
    checkpoints = [saved for saved in find_checkpoints(ctx.artifacts) if saved.step <= last]
    held: dict[Key, Row] = {}
    if checkpoints and any(step <= checkpoints[0].step for step, _, _ in pending):
        held = _held_rows(checkpoints)
    for saved in checkpoints:
        past = sorted(key for key in pending if key[0] <= saved.step)
        lost = [key for key in past if key not in held]
        if _usable(saved, last, lost):
            if saved is not checkpoints[0]:
                newest = checkpoints[0]
                why = "is damaged" if not newest.intact(*newest.state["files"]) else "lacks rows that are lost"
                ctx.say(f"the checkpoint of step {newest.step} {why}; the run goes on from step {saved.step}")
            return Start(saved, [held[key] for key in past if key in held])
    if ctx.stored.num_rows:
        ctx.say("no checkpoint is left to go on from; the run begins again at step 1 and will end with the same result")
    return Start(None, [])


def _held_rows(checkpoints: list[Checkpoint]) -> dict[Key, Row]:
    """Return the rows that the checkpoints of a run hold, as a dict from (step, split, sample) to row. Checkpoints with
    a damaged table of rows are skipped.
    """
    rows = [row for saved in checkpoints if saved.intact(ROWS) for row in saved.rows().to_pylist()]
    return {row_key(row): row for row in rows}


def _usable(saved: Checkpoint, last: int, lost: list[Key]) -> bool:
    """Return True if a training run can resume from the checkpoint `saved`. As a rule, all files of the checkpoint must
    be intact, and no row up to the checkpoint's step may be lost. A row is lost if neither the run's table nor an
    intact checkpoint has the row. `lost` holds the keys (step, split, sample) of the lost rows up to this step. `last`
    is the number of the run's last step. The checkpoint of step `last` may lack its optimizer state if `lost` is empty.

    There are two exceptions to the rule. First, rows of the measurement at the checkpoint's step may be lost, because
    this measurement is repeated. Second, if `saved` is the checkpoint of step `last` and no row is lost, nothing is
    left to compute, so the optimizer state is not needed. A repeated measurement needs the optimizer state, because the
    whole training is loaded.
    """
    if any((step, split) != (saved.step, VALIDATION) for step, split, _ in lost):
        return False
    needed = set(saved.state["files"])
    if saved.step == last and not lost:
        needed.discard(OPTIMIZER)
    return saved.intact(*needed)
