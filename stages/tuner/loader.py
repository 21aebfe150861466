"""The data loader: a background thread reads the next step while the device computes the current one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic

from stages.tuner.ranks import Ranks
from stages.tuner.task import M, S, Task


class Loader(Generic[S, M]):
    """Iterates over (step, micro-batches in host memory, seconds waited for them)."""

    def __init__(self, task: Task[S, M], steps: range, ranks: Ranks | None = None) -> None:
        self.task, self.steps = task, steps
        # A loss that compares the samples of a batch needs them all: then every rank reads the whole batch.
        self.ranks = ranks if ranks and ranks.size > 1 and task.objective.separable else None
        self.reader = task.reader()

    def __iter__(self) -> Iterator[tuple[int, list[M], float]]:
        if not self.steps:
            return
        self.prefetch(self.steps.start)
        with ThreadPoolExecutor(1, "loader") as pool:
            coming = pool.submit(self.read, self.steps.start)
            for step in self.steps:
                began = time.perf_counter()
                batches = coming.result()
                waited = time.perf_counter() - began
                if step + 1 in self.steps:
                    coming = pool.submit(self.read, step + 1)
                yield step, batches, waited

    def read(self, step: int) -> list[M]:
        batches = [self.reader.read(step, samples) for samples in self.draw(step)]
        if step + 1 in self.steps:
            self.prefetch(step + 1)
        return batches

    def prefetch(self, step: int) -> None:
        self.reader.prefetch([sample for samples in self.draw(step) for sample in samples])

    def draw(self, step: int) -> list[list[S]]:
        # One list per micro-batch to read.
        batches = self.task.draw(step)
        return self.ranks.share(batches, self.task.sizes(step)) if self.ranks else batches
