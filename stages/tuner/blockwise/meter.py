"""Measured memory, phase by phase, and the leaks that it shows. `planner` has the estimate before a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import linear_regression
from typing import Any, TypeVar

import mlx.core as mx

Item = TypeVar("Item")

LEAK_BYTES = 1 << 14  # least growth per execution that counts as a leak: one page, to which Metal rounds allocations
TEARDOWN = "end"
BETWEEN = "between phases"
LEAST_TIMES = 5  # measurements of a phase that are needed to find a leak


@dataclass
class Meter:
    """A record of the memory that MLX uses in each phase of a program. `phase(name)` measures a `with` block.
    `measure_each(items, name)` measures each item of an iteration. Each measurement appends a dict to `rows`. Its keys are
    "step", "phase", "before", "active", "peak" and "cache". The last four are in bytes. The value of "step" is the attribute
    `step`, which the caller may set.

    "before" and "active" are the memory in use before and after the phase. "peak" is the largest memory in use during the
    phase. "cache" is the size of MLX's cache after the phase.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Return a context manager that measures the memory of the code in its `with` block. At the end of the block, one dict
        is appended to `Meter.rows`. `name` is the name of the phase in this dict.

        At the start of the block, MLX's own peak is reset. The peak over all phases is `Meter.peak`.
        """
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        yield
        sizes = {"active": mx.get_active_memory(), "peak": mx.get_peak_memory(), "cache": mx.get_cache_memory()}
        self.rows.append({"step": self.step, "phase": name, "before": before, **sizes})

    def measure_each(self, items: Iterable[Item], name: str) -> Iterator[Item]:
        """Yield each item of `items`, and measure the memory that is used to produce it. The measurement is recorded as
        a phase called `name`. After each item, the attribute `step` grows by 1. The end of `items` is measured too, as
        the phase "end": an iterator may still run code there.
        """
        each = iter(items)
        while True:
            with self.phase(name):
                item = next(each, each)
            if item is each:
                self.rows[-1]["phase"] = TEARDOWN
                return
            self.step += 1
            yield item  # type: ignore[misc]

    @property
    def peak(self) -> int:
        """The largest peak of all measured phases, in bytes; 0 before the first phase."""
        return max((row["peak"] for row in self.rows), default=0)

    @property
    def can_find_leaks(self) -> bool:
        """Return True if a phase was measured at least 5 times. With fewer measurements, `leaks` returns an empty
        dict.
        """
        return any(count >= LEAST_TIMES for count in Counter(row["phase"] for row in self.rows).values())

    def leaks(self, least: int = LEAK_BYTES) -> dict[str, int]:
        """Return the phases that leak memory, as a dict from phase to bytes per execution. A phase leaks if each execution
        leaves at least `least` bytes in use, on average. A phase that was measured fewer than 5 times is left out.

        The first and the last execution are not counted: the first may fill caches, and what the last leaves may still be
        freed. The others are divided into thirds. In each third, the average must be at least `least` bytes. A cache that grows
        once is thus no leak. The result is the slope of a line fitted to the sums.
        """
        leaking = {}
        for name, left in self._left().items():
            steady = left[1:-1]
            thirds = [steady[len(steady) * n // 3 : len(steady) * (n + 1) // 3] for n in range(3)]
            if len(left) >= LEAST_TIMES and all(sum(third) >= least * len(third) for third in thirds):
                leaking[name] = round(linear_regression(range(len(steady)), list(accumulate(steady))).slope)
        return leaking

    def _left(self) -> dict[str, list[int]]:
        """Return how much memory each execution of each phase allocated and never freed. The result maps the name of a
        phase to a list of bytes, one number per execution, in order. The name "between phases" holds the allocations
        between two phases.

        When memory is freed later, the newest allocations count as freed first.
        """
        left: dict[str, list[int]] = {}
        added: list[tuple[str, int]] = []  # (phase, number of its execution)
        for name, change in self._changes():
            times = left.setdefault(name, [])
            times.append(max(change, 0))
            if change > 0:
                added.append((name, len(times) - 1))
            while change < 0 and added:
                phase, n = added[-1]
                freed = min(-change, left[phase][n])
                change, left[phase][n] = change + freed, left[phase][n] - freed
                if not left[phase][n]:
                    added.pop()
        return left

    def _changes(self) -> Iterator[tuple[str, int]]:
        """Yield `(name, bytes)` for each measured phase and for each gap between two phases, in order. `bytes` is the
        change of the memory in use. It is negative if memory was freed. A gap has the name "between phases". The phase
        "end" is left out.

        Functions return and free their locals between phases. In the phase "end" the weights are freed, and this would
        hide a leak.
        """
        active = None
        for row in (row for row in self.rows if row["phase"] != TEARDOWN):
            if active is not None:
                yield BETWEEN, row["before"] - active
            active = row["active"]
            yield row["phase"], active - row["before"]
