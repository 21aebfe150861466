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
    # By phase: "step", "phase", and bytes in use "before" it, after it ("active"), at most during it ("peak"), in MLX's "cache".
    rows: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0  # may be set by the caller; `measure_each` counts it

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        # MLX's own peak starts anew here; that over all phases is `peak`.
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        yield
        sizes = {"active": mx.get_active_memory(), "peak": mx.get_peak_memory(), "cache": mx.get_cache_memory()}
        self.rows.append({"step": self.step, "phase": name, "before": before, **sizes})

    def measure_each(self, items: Iterable[Item], name: str) -> Iterator[Item]:
        """Yields the items, measuring how each is produced; the end of `items` is the phase "end", where code may still run."""
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
        return max((row["peak"] for row in self.rows), default=0)

    @property
    def can_find_leaks(self) -> bool:
        return any(count >= LEAST_TIMES for count in Counter(row["phase"] for row in self.rows).values())

    def leaks(self, least: int = LEAK_BYTES) -> dict[str, int]:
        """Bytes per execution of the phases whose executions leave `least` or more in use."""
        leaking = {}
        for name, left in self._left().items():
            # The first execution may fill caches, and what the last leaves may still be freed. Every third of the others must
            # grow, so a cache that grows once is no leak.
            steady = left[1:-1]
            thirds = [steady[len(steady) * n // 3 : len(steady) * (n + 1) // 3] for n in range(3)]
            if len(left) >= LEAST_TIMES and all(sum(third) >= least * len(third) for third in thirds):
                leaking[name] = round(linear_regression(range(len(steady)), list(accumulate(steady))).slope)
        return leaking

    def _left(self) -> dict[str, list[int]]:
        """Bytes that each execution of each phase allocated and nothing freed since."""
        left: dict[str, list[int]] = {}
        added: list[tuple[str, int]] = []  # (phase, number of its execution)
        for name, change in self._changes():
            times = left.setdefault(name, [])
            times.append(max(change, 0))
            if change > 0:
                added.append((name, len(times) - 1))
            # When memory is freed later, the newest allocations count as freed first.
            while change < 0 and added:
                phase, n = added[-1]
                freed = min(-change, left[phase][n])
                change, left[phase][n] = change + freed, left[phase][n] - freed
                if not left[phase][n]:
                    added.pop()
        return left

    def _changes(self) -> Iterator[tuple[str, int]]:
        active = None
        # Without the end, where the weights are freed: that would hide a leak. Between phases, functions return and free
        # locals.
        for row in (row for row in self.rows if row["phase"] != TEARDOWN):
            if active is not None:
                yield BETWEEN, row["before"] - active
            active = row["active"]
            yield row["phase"], active - row["before"]
