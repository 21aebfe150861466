"""The start of a training run: the newest checkpoint that it can resume from, and the rows that only checkpoints hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stages.run import Run
from stages.tuner.checkpoint import OPTIMIZER, ROWS, Checkpoint, find_checkpoints
from stages.tuner.validation import VALIDATION

Row = dict[str, Any]
Key = tuple[int, str, int]  # step, split, sample


@dataclass(frozen=True)
class Start:
    checkpoint: Checkpoint | None  # None: step 0
    recovered: list[Row]  # rows up to its step that the table lacks, read from checkpoints

    @property
    def step(self) -> int:
        return self.checkpoint.step if self.checkpoint else 0


def row_key(row: Row) -> Key:
    return row["step"], row["split"], row["sample"]


def find_start(run: Run[Any], last: int) -> Start:
    """The newest intact checkpoint before which no row is lost (in neither the table nor an intact checkpoint); else step 0."""
    pending = {row_key(row) for row in run.output.pending.to_pylist()}
    checkpoints = [saved for saved in find_checkpoints(run.output.artifacts) if saved.step <= last]
    held: dict[Key, Row] = {}
    # The rows of the checkpoints are needed only after a kill between a checkpoint and the commit of its rows.
    if checkpoints and any(step <= checkpoints[0].step for step, _, _ in pending):
        held = _held_rows(checkpoints)
    for saved in checkpoints:
        past = sorted(key for key in pending if key[0] <= saved.step)
        lost = [key for key in past if key not in held]
        if _usable(saved, last, lost):
            if saved is not checkpoints[0]:
                newest = checkpoints[0]
                why = "is damaged" if not newest.intact(*newest.state["files"]) else "lacks rows that are lost"
                run.report.say(f"the checkpoint of step {newest.step} {why}; the run goes on from step {saved.step}")
            return Start(saved, [held[key] for key in past if key in held])
    if run.output.stored.num_rows:
        run.report.say("no checkpoint is left to go on from; the run begins again at step 1 and will end with the same result")
    return Start(None, [])


def _held_rows(checkpoints: list[Checkpoint]) -> dict[Key, Row]:
    rows = [row for saved in checkpoints if saved.intact(ROWS) for row in saved.rows().to_pylist()]
    return {row_key(row): row for row in rows}


def _usable(saved: Checkpoint, last: int, lost: list[Key]) -> bool:
    # Rows of the measurement at this step may be lost: it is repeated.
    if any((step, split) != (saved.step, VALIDATION) for step, split, _ in lost):
        return False
    needed = set(saved.state["files"])
    # Nothing is left to compute, so no optimizer state is needed. A repeated measurement loads the whole training, and does.
    if saved.step == last and not lost:
        needed.discard(OPTIMIZER)
    return saved.intact(*needed)
