"""How many steps a run has if [train] steps = "auto": so many passes over each picture.

Sources of the numbers, all of them recipes that others published, none measured here: a style of FLUX.2 klein 9B 30 passes, at
least 500 steps of one picture, and rank 128 overfits below 10 pictures (happyin.space, 56 runs); a character 50 to 120 passes
(RunComfy).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from stages.settings import several

AUTO = "auto"
LEAST = 500  # pictures drawn in a run, repetitions counted
MOST_PASSES = 120
HIGH_RANK, FEW = 128, 10


def steps_of(passes: float, pictures: int, batch: int, share: float = 1.0) -> int:
    """`pictures`: those of the subject; `batch`: pictures of a step; `share`: of the draws that are of the subject, the others
    being of the class. Repeats do not count: they divide the draws among the pictures.
    """
    return math.ceil(max(LEAST, passes * pictures) / share / batch)


def explanation(passes: float, pictures: int, batch: int) -> str:
    """Such as "24 pictures x 50 passes in batches of 1"."""
    least = f", at least {LEAST} draws" if passes * pictures < LEAST else ""
    return f"{several(pictures, 'picture')} x {passes:g} passes{least}, in batches of {batch}"


def warnings(steps: int, pictures: int, batch: int, rank: int) -> Iterator[str]:
    """Where the numbers speak of overfitting."""
    passes = steps * batch / pictures
    if passes > MOST_PASSES and steps * batch > LEAST:
        yield (
            f"train: {several(pictures, 'picture')} are each drawn {passes:.0f} times in {steps} steps; published recipes end at "
            f"{MOST_PASSES}, and more may copy the pictures: compare checkpoints, or set fewer steps"
        )
    if rank >= HIGH_RANK and pictures < FEW:
        yield f"train: rank {rank} overfitted in published runs with fewer than {FEW} pictures; 32 is usual"
