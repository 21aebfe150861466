"""Memory: what the device has, and what was used of it, phase by phase. What a run will take, `planner` says."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import mlx.core as mx

Item = TypeVar("Item")

GB = 1e9
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
        """The same items, the making of each measured as one phase of one step: any stage's `run` can go through it."""
        each = iter(items)
        while True:
            with self.phase(name):
                item = next(each, each)
            if item is each:
                self.rows.pop()  # the end is no item
                return
            self.step += 1
            yield item  # type: ignore[misc]

    @property
    def peak(self) -> int:
        """The largest peak of any phase, bytes."""
        return max((row["peak"] for row in self.rows), default=0)

    def leaks(self, least: int = 1 << 20) -> dict[str, int]:
        """Phases that leave at least `least` bytes behind every time: bytes a time, by phase.

        What one phase adds and a later one lets go is no leak: what is let go counts against what was added last.
        """
        added: list[list[Any]] = []  # [phase, which time, bytes that are still there]
        times: Counter[str] = Counter()
        for row in self.rows:
            change, name = row["active"] - row["before"], row["phase"]
            if change > 0:
                added.append([name, times[name], change])
            while change < 0 and added:
                gone = min(-change, added[-1][2])
                change, added[-1][2] = change + gone, added[-1][2] - gone
                if not added[-1][2]:
                    added.pop()
            times[name] += 1
        found = {}
        for name, count in times.items():
            # The first time may fill caches of its own; what the last one left may be let go yet.
            left = {n: size for phase, n, size in added if phase == name and size >= least and 0 < n < count - 1}
            if count >= 5 and len(left) == count - 2:
                found[name] = sum(left.values()) // len(left)
        return found
