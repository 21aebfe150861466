"""When held-out samples are measured, when the run ends early, which step is best: functions of the losses alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from stages.tuner.config import ValidationConfig
from stages.tuner.task import Row

TRAIN, VALIDATION = "train", "validation"  # values of the column `split`


class Validation:
    """A measurement counts once all `count` samples have a loss."""

    def __init__(self, config: ValidationConfig | None, count: int, steps: int) -> None:
        self.config, self.count, self.steps = config, count, steps
        self.rows: list[Row] = []
        self.last_step = steps  # the last step of the run, as far as is known: `patience` may end it early
        self.best_step: int | None = None  # the step up to `last_step` with the lowest mean loss; None: nothing is measured yet

    def add(self, rows: Iterable[Row]) -> None:
        self._replace([*self.rows, *(row for row in rows if row["split"] == VALIDATION)])

    def is_due(self, step: int) -> bool:
        return self.config is not None and step % self.config.every == 0

    def discard_incomplete(self, step: int) -> bool:
        """Forget the losses of an interrupted measurement at `step`. True if it must be repeated."""
        if not self.is_due(step) or sum(row["step"] == step for row in self.rows) >= self.count:
            return False
        self._replace([row for row in self.rows if row["step"] != step])
        return True

    @property
    def means(self) -> dict[int, float]:
        return mean_losses(((row["step"], row["loss"]) for row in self.rows), self.count)

    def _replace(self, rows: list[Row]) -> None:
        self.rows = rows
        if self.config is None:
            return
        means, stop = self.means, None
        if self.config.patience is not None:
            stop = early_stop(means, self.config.every, self.config.patience, self.config.min_delta)
        self.last_step = self.steps if stop is None else min(stop, self.steps)
        self.best_step = best_step({step: mean for step, mean in means.items() if step <= self.last_step})


def measured_steps(every: int, last: int) -> range:
    return range(0, last + 1, every)


def mean_losses(losses: Iterable[tuple[int, float]], count: int) -> dict[int, float]:
    """Step -> mean, for steps with exactly `count` losses; infinite if one of them is not finite."""
    by_step: dict[int, list[float]] = {}
    for step, loss in losses:
        by_step.setdefault(step, []).append(loss)
    whole = {step: values for step, values in sorted(by_step.items()) if len(values) == count}
    return {step: math.fsum(v) / count if all(map(math.isfinite, v)) else math.inf for step, v in whole.items()}


def early_stop(means: Mapping[int, float], every: int, patience: int, min_delta: float = 0.0) -> int | None:
    """The step at which `patience` measurements in a row were not the lowest by more than `min_delta`, or None."""
    lowest, since, step = math.inf, 0, 0
    # Measurements after a missing one do not count: a resumed run must decide as an unbroken one.
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
    # Step 0 is the untrained adapter. Of equal losses, the earliest step.
    finite = {step: loss for step, loss in means.items() if step and loss < math.inf}
    return min(finite, key=lambda step: (finite[step], step), default=None)
