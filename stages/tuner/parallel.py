"""The parts of the training loop that several ranks do together. Alone, each is a no-op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import mlx.core as mx
import numpy as np

from stages.run import Run
from stages.tuner.adapters.stacks import Stacks
from stages.tuner.checkpoint import Checkpoint
from stages.tuner.config import TrainingConfig
from stages.tuner.ranks import Ranks, merged
from stages.tuner.step import StepResult, TrainingStep
from stages.tuner.task import HeldOut, MicroBatch, Task


def check_ranks(run: Run[Any], config: TrainingConfig, ranks: Ranks) -> None:
    """Raises ValueError, in every rank, if the ranks differ in recipe or cannot divide the batch."""
    if config.data_parallel not in (None, ranks.size):
        raise ValueError(
            f"train.data_parallel must be unset or the number of ranks ({ranks.size}), got {config.data_parallel}; "
            f"`latentmill launch --ranks {config.data_parallel}` starts so many"
        )
    if config.batch_size % ranks.size:
        raise ValueError(f"train.batch_size must be a multiple of the number of ranks ({ranks.size}), got {config.batch_size}")
    recipes = ranks.each(run.output.provenance.get("recipe", ""))
    other = next((rank for rank, recipe in enumerate(recipes) if recipe != recipes[0]), None)
    if other is not None:
        raise ValueError(
            f"train: rank {other} has other settings, tables or weights than rank 0 (recipes {recipes[other]} and {recipes[0]}); "
            "give every host the same project"
        )


def announce_ranks(say: Callable[[str], None], ranks: Ranks, start: Checkpoint | None) -> None:
    begun = start.state.get("ranks", 1) if start else ranks.size
    if begun != ranks.size:
        say(f"the run began with {begun} ranks and goes on with {ranks.size}: the same samples and, up to rounding, gradients")
    elif ranks.size > 1:
        say(f"{ranks.size} ranks train together, each on its share of every batch")


def same_state(training: TrainingStep, ranks: Ranks) -> None:
    if ranks.size == 1:
        return
    # Chips of different kinds round an update differently, so their copies would drift apart.
    masters, state = training.masters, training.state
    given = masters.groups, _to_numpy(masters.arrays), _to_numpy(state)
    groups, arrays, values = ranks.first(given if ranks.leads else None) or given
    if not ranks.leads:
        training.masters, training.state = Stacks(groups, _to_mlx(arrays)), _to_mlx(values)
        mx.eval(training.masters.arrays, training.state)


def _to_numpy(arrays: dict[str, mx.array]) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in arrays.items()}


def _to_mlx(arrays: dict[str, np.ndarray]) -> dict[str, mx.array]:
    return {name: mx.array(value) for name, value in arrays.items()}


def step_samples(task: Task[Any, Any], step: int, batches: Sequence[MicroBatch], ranks: Ranks) -> list[Any]:
    # This rank has read only its share.
    if ranks.size > 1 and task.objective.separable:
        return [sample for batch in task.draw(step) for sample in batch]
    return [sample for batch in batches for sample in batch.samples]


def merge_results(result: StepResult, task: Task[Any, Any], step: int, ranks: Ranks) -> StepResult:
    """The losses and terms of all samples of a step, in order."""
    if ranks.size == 1 or not task.objective.separable:
        return result
    columns = {"loss": result.losses, **result.terms}
    found = ranks.each(columns)
    owners = ranks.owners(task.sizes(step))
    names = list(dict.fromkeys(name for each in found for name in each))
    nothing = [[None] * len(each["loss"]) for each in found]
    values: dict[str, list[Any]] = {
        name: merged([each.get(name, nothing[rank]) for rank, each in enumerate(found)], owners) for name in names
    }
    return replace(result, losses=values.pop("loss"), terms=values)


def measure_together(
    held_out: HeldOut[Any], training: TrainingStep, ranks: Ranks, stopped: Callable[[], bool]
) -> Iterator[tuple[Any, dict[str, list[Any]]]]:
    """(micro-batch, column -> values of its samples), in order. Every rank measures its share and yields all."""
    coming: list[Any] = []
    batches = held_out.micro_batches()
    # In rounds of one micro-batch per rank: all ranks stop together, after the same round.
    while coming := list(islice(batches, ranks.size)):
        if stopped():
            return
        own = training.measure(coming[ranks.rank]) if ranks.rank < len(coming) else {}
        yield from zip(coming, ranks.each(own)[: len(coming)], strict=True)  # the last round may leave ranks without a batch
