"""The rows of results.jsonl and the numbers that the page of the experiments takes from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data import MEASUREMENTS

FILE = MEASUREMENTS / "experiments.jsonl"
GUIDANCE = (1.0, 3.0, 5.0)  # the guidance values at which previews were drawn
DROPOUT = {"dropout 0": "0", "plain": "0.1", "dropout 0.5": "0.5"}  # run -> its caption dropout
PRESERVED = {"preserved, dropout 0": "0", "preserved": "0.1"}  # likewise, of the runs with [train.preservation]

Row = dict[str, Any]


class Results:
    """All rows of results.jsonl. The column `what` of a row says what it holds: "data", "run", "loss" or "picture"."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)

    def select(self, **values: Any) -> list[Row]:
        """Return the rows whose columns equal `values`. Raises AssertionError if there are none."""
        found = [row for row in self.rows if all(row.get(name) == value for name, value in values.items())]
        assert found, f"no row has {values}"
        return found

    def loss(self, run: str, side: int = 128, caption: str = "own") -> float:
        """Return the held-out loss of a run's last adapter. `run` is the run's name. `side` is the resolution of the crops
        in pixels. `caption` is "own" (the picture's caption) or "empty" (the empty caption).
        """
        return float(self.select(what="loss", run=run, side=side, caption=caption)[0]["loss"])

    def loss_curve(self, average: bool) -> tuple[list[int], list[float]]:
        """Return (steps, held-out losses) of the run "noisy". The losses are those of the adapter, or of its moving average
        if `average` is True.
        """
        rows = self.select(what="loss", run="noisy", side=128, average=average)
        return [row["step"] for row in rows], [row["loss"] for row in rows]

    def mean(self, column: str, run: str, kind: str = "trigger", guidance: float = 3.0, side: int = 128) -> tuple[float, float]:
        """Return (mean, standard error) of a score over a run's previews. `column` is the score. `run` is the run's name.
        `kind` is the kind of prompt. `guidance` and `side` (in pixels) choose previews drawn with these values.

        For `style`, the style of the base's preview of the same subject (with the trigger, guidance 3, 128 px) is
        subtracted, because subjects differ more than the two styles do. The empty prompt has no subject, so nothing is
        subtracted.
        """
        pictures = self.select(what="picture", run=run, kind=kind, guidance=guidance, side=side)
        base: dict[str, float] = {}
        if column == "style" and kind != "empty":
            rows = self.select(what="picture", run="base", kind="trigger", guidance=3.0, side=128)
            base = {row["subject"]: row["style"] for row in rows}
        return mean_and_error([row[column] - base.get(row["subject"], 0.0) for row in pictures])


def read(file: Path = FILE) -> Results:
    return Results(json.loads(line) for line in file.read_text().splitlines())


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of at least two values and its standard error."""
    array = np.array(values, float)
    return float(array.mean()), float(array.std(ddof=1) / len(array) ** 0.5)


def mean_change(values: Sequence[float]) -> float:
    """Return the mean absolute difference of neighbouring values."""
    return float(np.abs(np.diff(values)).mean())
