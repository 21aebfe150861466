"""The data loader: a background thread reads the next step while the device computes the current one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic

from stages.tuner.ranks import Ranks
from stages.tuner.task import M, S, Task


class Loader(Generic[S, M]):
    """Load the samples of training steps one step ahead, in a background thread. Iterate over `Loader(task, steps, ranks)` to
    get (step, batches, seconds) for each step. `task` is the training task that supplies the samples. `steps` is a range of
    steps. `ranks` are the processes that train together, or None for this process alone. `batches` is a list of the step's
    batches, in host memory. `seconds` is how long the caller waited for them.

    With several ranks, each rank loads only its share of a batch. If the loss compares the samples of a batch with each other,
    each rank loads the whole batch.
    """

    def __init__(self, task: Task[S, M], steps: range, ranks: Ranks | None = None) -> None:
        self.task, self.steps = task, steps
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
        """Return the batches of samples of a step, read into host memory. Then start to read the samples of the next step from
        disk in the background.
        """
        batches = [self.reader.read(step, samples) for samples in self.draw(step)]
        if step + 1 in self.steps:
            self.prefetch(step + 1)
        return batches

    def prefetch(self, step: int) -> None:
        """Start to read all samples of a step from disk in the background."""
        self.reader.prefetch([sample for samples in self.draw(step) for sample in samples])

    def draw(self, step: int) -> list[list[S]]:
        """Return the samples of training step `step` that this process computes, as a list of lists. Each inner list is
        read as one micro-batch. It holds the samples of a whole batch or of a part of a batch. Samples that other
        processes compute are left out.
        """
        batches = self.task.draw(step)
        return self.ranks.share(batches, self.task.sizes(step)) if self.ranks else batches
