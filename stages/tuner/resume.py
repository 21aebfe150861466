"""Where a training run starts: the newest checkpoint that it can go on from, and the rows that only checkpoints hold."""

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
    """The checkpoint that a run goes on from, None for step 0, and rows of the steps up to it that are not stored yet."""

    checkpoint: Checkpoint | None
    recovered: list[Row]

    @property
    def step(self) -> int:
        """The last step that is done; 0 without a checkpoint."""
        return self.checkpoint.step if self.checkpoint else 0


def row_key(row: Row) -> Key:
    """Return the key of a row of training: (step, split, sample)."""
    return row["step"], row["split"], row["sample"]


def find_start(ctx: TrainingContext, last: int) -> Start:
    """Find the newest usable checkpoint up to step `last`, and say so if a newer one is damaged or all are lost. A checkpoint is
    usable if its files are intact and every row up to its step is stored or held by a checkpoint.
    """
    pending = {row_key(row) for row in ctx.pending.to_pylist()}
    checkpoints = [saved for saved in find_checkpoints(ctx.artifacts) if saved.step <= last]
    held: dict[Key, Row] = {}
    if checkpoints and any(step <= checkpoints[0].step for step, _, _ in pending):
        held = _held_rows(checkpoints)
    for saved in checkpoints:
        past = sorted(key for key in pending if key[0] <= saved.step)
        if _usable(saved, last, lost=[key for key in past if key not in held]):
            if saved is not checkpoints[0]:
                ctx.say(f"the checkpoint of step {checkpoints[0].step} is damaged; the run goes on from step {saved.step}")
            return Start(saved, [held[key] for key in past if key in held])
    if ctx.stored.num_rows:
        ctx.say("no checkpoint is left to go on from; the run begins again at step 1 and will end with the same result")
    return Start(None, [])


def _held_rows(checkpoints: list[Checkpoint]) -> dict[Key, Row]:
    """All rows that intact checkpoints hold, by key."""
    rows = [row for saved in checkpoints if saved.intact(ROWS) for row in saved.rows().to_pylist()]
    return {row_key(row): row for row in rows}


def _usable(saved: Checkpoint, last: int, lost: list[Key]) -> bool:
    """Whether a run of `last` steps can go on from a checkpoint. `lost` are rows up to its step that exist nowhere. The
    measurement after its own step may be lost: it was interrupted, and is repeated. The last step needs no optimizer state.
    """
    if any((step, split) != (saved.step, VALIDATION) for step, split, _ in lost):
        return False
    needed = set(saved.state["files"])
    if saved.step == last and not lost:
        needed.discard(OPTIMIZER)
    return saved.intact(*needed)
