"""Memory: what the device has, and what was used of it, phase by phase. What a run will take, `planner` says."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import linear_regression
from typing import Any, TypeVar

import mlx.core as mx

Item = TypeVar("Item")

GB = 1e9
LEAST = 1 << 14  # bytes a time, of what is called a leak: a page of Metal's, to which allocations are rounded
END = "end"
BETWEEN = "what comes between the phases"
ENOUGH = 5  # times that a phase must have come to tell whether it leaks
HEADROOM = 0.15  # of the device's memory: for the system, MLX's cache and what is being copied


def device_bytes() -> int:
    """Memory that the device may use: what Metal recommends, a GPU's own, or the machine's."""
    info: Mapping[str, Any] = mx.device_info()
    for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if key in info:
            return int(info[key])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def budget(limit_gb: float | None = None) -> int:
    """Bytes that training may take: the setting, or the device's memory less headroom."""
    return int(limit_gb * GB if limit_gb else device_bytes() * (1 - HEADROOM))


@dataclass
class Meter:
    """Memory by phase, a row for each: active before and after, the peak within, MLX's cache; bytes."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what runs inside. MLX's own peak starts again; `peak` has the largest of all."""
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        yield
        sizes = {"active": mx.get_active_memory(), "peak": mx.get_peak_memory(), "cache": mx.get_cache_memory()}
        self.rows.append({"step": self.step, "phase": name, "before": before, **sizes})

    def over(self, items: Iterable[Item], name: str) -> Iterator[Item]:
        """The same items, the making of each measured as one phase of one step: a stage's `run` goes through it.

        What comes after the last is the phase `end`.
        """
        each = iter(items)
        while True:
            with self.phase(name):
                item = next(each, each)
            if item is each:
                self.rows[-1]["phase"] = END
                return
            self.step += 1
            yield item  # type: ignore[misc]

    @property
    def peak(self) -> int:
        """The largest peak of any phase, bytes."""
        return max((row["peak"] for row in self.rows), default=0)

    @property
    def tells(self) -> bool:
        """Whether any phase came often enough that `leaks` can know."""
        return any(count >= ENOUGH for count in Counter(row["phase"] for row in self.rows).values())

    def leaks(self, least: int = LEAST) -> dict[str, int]:
        """Phases that leave more behind from time to time: bytes a time, by phase, fitted over all times.

        The first and the last time do not count: that may fill caches of its own, what this left may be let go yet. Of the
        others each third must leave `least` bytes a time or more, so that what grows once, a cache, is no leak.
        """
        found = {}
        for name, left in self._left().items():
            steady = left[1:-1]
            thirds = [steady[len(steady) * n // 3 : len(steady) * (n + 1) // 3] for n in range(3)]
            if len(left) >= ENOUGH and all(sum(third) >= least * len(third) for third in thirds):
                found[name] = round(linear_regression(range(len(steady)), list(accumulate(steady))).slope)
        return found

    def _left(self) -> dict[str, list[int]]:
        """What each phase added and nobody let go, by time, bytes: what is let go counts against what was added last."""
        left: dict[str, list[int]] = {}
        added: list[tuple[str, int]] = []  # phase, which time
        for name, change in self._changes():
            times = left.setdefault(name, [])
            times.append(max(change, 0))
            if change > 0:
                added.append((name, len(times) - 1))
            while change < 0 and added:
                phase, n = added[-1]
                gone = min(-change, left[phase][n])
                change, left[phase][n] = change + gone, left[phase][n] - gone
                if not left[phase][n]:
                    added.pop()
        return left

    def _changes(self) -> Iterator[tuple[str, int]]:
        """Every phase and by how much memory grew in it; and, since names are let go when a function returns, between two.

        The end lets go of weights, which came first: against what came last that would hide a leak.
        """
        active = None
        for row in (row for row in self.rows if row["phase"] != END):
            if active is not None:
                yield BETWEEN, row["before"] - active
            active = row["active"]
            yield row["phase"], active - row["before"]
