"""Validation: at which steps held-out samples are measured, when the run ends early, and which step is best.

All decisions are functions of the measured losses alone, so that a resumed run decides as an unbroken one does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from stages.tuner.config import ValidationConfig

TRAIN, VALIDATION = "train", "validation"  # values of the column `split`

Row = dict[str, Any]


class Validation:
    """The losses of held-out samples that were measured during a run. `config` holds the settings of the validation. If
    `config` is None, nothing is measured. `count` is the number of held-out samples per measurement. `steps` is the
    number of steps of the run if it does not stop early.

    The attribute `last_step` is the last step of the run. It is below `steps` if the run stops early. The attribute
    `best_step` is the step with the lowest mean loss, or None if there is none. A measurement counts once the losses of
    all `count` samples are known.
    """

    def __init__(self, config: ValidationConfig | None, count: int, steps: int) -> None:
        self.config, self.count, self.steps = config, count, steps
        self.rows: list[Row] = []
        self.last_step = steps  # the last step of the run, as far as is known: `patience` may end it early
        self.best_step: int | None = None  # the step up to `last_step` with the lowest mean loss; None: nothing is measured yet

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows of the run, as dicts with the columns `step`, `split` and `loss`. Only rows with the split "validation" are
        kept. The rows of one measurement may be added in several calls.
        """
        self._replace([*self.rows, *(row for row in rows if row["split"] == VALIDATION)])

    def add_table(self, rows: pa.Table) -> None:
        """Add the losses of held-out samples from an Arrow table of the run. The table has the columns `step`, `split`
        and `loss`, and may have others. Only rows with the split "validation" are kept.
        """
        self.add(rows.select(["step", "split", "loss"]).to_pylist())

    def is_due(self, step: int) -> bool:
        """Return True if held-out samples must be measured after this step. Step 0 means before the first step."""
        return self.config is not None and step % self.config.every == 0

    def discard_incomplete(self, step: int) -> bool:
        """Check the measurement of held-out samples after step `step`, and return True if the caller must repeat it.
        The measurement must be repeated if it is due after this step and some or all of its losses are missing. In this
        case, the losses that are known for this step are discarded. If no measurement is due or none of its losses is
        missing, nothing is discarded and the result is False.
        """
        if not self.is_due(step) or sum(row["step"] == step for row in self.rows) >= self.count:
            return False
        self._replace([row for row in self.rows if row["step"] != step])
        return True

    @property
    def means(self) -> dict[int, float]:
        """The mean loss of each complete measurement: step -> mean loss."""
        return mean_losses(((row["step"], row["loss"]) for row in self.rows), self.count)

    def _replace(self, rows: list[Row]) -> None:
        """Set the measured rows, and compute `last_step` and `best_step` from them. Each row is a dict with `step`, `split` and
        `loss`.
        """
        self.rows = rows
        if self.config is None:
            return
        means, stop = self.means, None
        if self.config.patience is not None:
            stop = early_stop(means, self.config.every, self.config.patience, self.config.min_delta)
        self.last_step = self.steps if stop is None else min(stop, self.steps)
        self.best_step = best_step({step: mean for step, mean in means.items() if step <= self.last_step})


def measured_steps(every: int, last: int) -> range:
    """Return the steps after which held-out samples are measured. These are step 0 (before the first step) and then every `every`
    steps, up to and including `last`.
    """
    return range(0, last + 1, every)


def mean_losses(losses: Iterable[tuple[int, float]], count: int) -> dict[int, float]:
    """Return the mean loss of each step, as a dict from step to mean. `losses` holds (step, loss) pairs in any order,
    one per sample. A step is left out if it does not have exactly `count` losses. If a loss of a step is not finite,
    the mean of this step is infinite.
    """
    by_step: dict[int, list[float]] = {}
    for step, loss in losses:
        by_step.setdefault(step, []).append(loss)
    whole = {step: values for step, values in sorted(by_step.items()) if len(values) == count}
    return {step: math.fsum(v) / count if all(map(math.isfinite, v)) else math.inf for step, v in whole.items()}


def early_stop(means: Mapping[int, float], every: int, patience: int, min_delta: float = 0.0) -> int | None:
    """Return the step after which early stopping ends the run, or None if it does not. `means` maps steps to mean validation
    losses, measured every `every` steps from step 0. A measurement is good if it is lower than all earlier ones by more than
    `min_delta`. The run ends after `patience` measurements in a row that are not good. Measurements after a missing one are
    ignored.
    """
    lowest, since, step = math.inf, 0, 0
    while step in means:
        if means[step] < lowest - min_delta:
            lowest, since = means[step], 0
        elif step:
            since += 1
        if since >= patience:
            return step
        step += every
    return None


def best_step(means: Mapping[int, float]) -> int | None:
    """Return the step with the lowest mean loss. Of equal losses, the earliest step is returned. `means` maps steps to mean
    losses. Step 0 and infinite losses are ignored. If nothing is left, the result is None.
    """
    finite = {step: loss for step, loss in means.items() if step and loss < math.inf}
    return min(finite, key=lambda step: (finite[step], step), default=None)
