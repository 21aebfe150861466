"""The parts of the training loop that several ranks (processes of one run, ranks.py) do together. Alone, each is a no-op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import mlx.core as mx
import numpy as np

from stages.tuner.adapters.stacks import Stacks
from stages.tuner.checkpoint import Checkpoint
from stages.tuner.config import TrainingConfig
from stages.tuner.ranks import Ranks, merged
from stages.tuner.step import StepResult, TrainingStep
from stages.tuner.task import HeldOut, MicroBatch, Task, TrainingContext


def check_ranks(ctx: TrainingContext, config: TrainingConfig, ranks: Ranks) -> None:
    """Raise ValueError, in every rank (process), if the ranks cannot train together. `ctx` is the run's context. `config` holds
    the settings [train]. `ranks` are the processes.

    The number of ranks must divide the batch size. If [train] `data_parallel` is set, it must be the number of ranks. All ranks
    must have the same settings, tables and weights.
    """
    if config.data_parallel not in (None, ranks.size):
        raise ValueError(
            f"train.data_parallel must be unset or the number of ranks ({ranks.size}), got {config.data_parallel}; "
            f"`latentmill launch --ranks {config.data_parallel}` starts so many"
        )
    if config.batch_size % ranks.size:
        raise ValueError(f"train.batch_size must be a multiple of the number of ranks ({ranks.size}), got {config.batch_size}")
    recipes = ranks.each(ctx.provenance.get("recipe", ""))
    other = next((rank for rank, recipe in enumerate(recipes) if recipe != recipes[0]), None)
    if other is not None:
        raise ValueError(
            f"train: rank {other} has other settings, tables or weights than rank 0 (recipes {recipes[other]} and {recipes[0]}); "
            "give every host the same project"
        )


def announce_ranks(say: Callable[[str], None], ranks: Ranks, start: Checkpoint | None) -> None:
    """Tell the user how many ranks (processes) train together. `say(text)` shows one line. `ranks` are the processes. `start`
    is the checkpoint to continue from, or None. If the run began with another number of ranks, the line names both numbers. If
    a run always had a single rank, nothing is shown.
    """
    begun = start.state.get("ranks", 1) if start else ranks.size
    if begun != ranks.size:
        say(f"the run began with {begun} ranks and goes on with {ranks.size}: the same samples and, up to rounding, gradients")
    elif ranks.size > 1:
        say(f"{ranks.size} ranks train together, each on its share of every batch")


def same_state(training: TrainingStep, ranks: Ranks) -> None:
    """Give every rank (process of the run) the adapter and the optimizer's state of rank 0. `training` holds both, and
    is changed in place. `ranks` are the processes.

    Chips of different kinds round an update differently, so their copies would drift apart.
    """
    if ranks.size == 1:
        return
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
    """Return all samples of training step `step`, in order. `batches` holds the micro-batches that this rank has read.
    With several ranks, `batches` may be only a part of the step. In this case, the samples are drawn again with
    `task.draw(step)`.

    `batches` is a part of the step if the loss of `task` is separable. Otherwise every rank reads all samples.
    """
    if ranks.size > 1 and task.objective.separable:
        return [sample for batch in task.draw(step) for sample in batch]
    return [sample for batch in batches for sample in batch.samples]


def merge_results(result: StepResult, task: Task[Any, Any], step: int, ranks: Ranks) -> StepResult:
    """Return the result of a whole training step: the losses and values of all its samples, in the order of the
    samples. The losses and values are collected from all processes. `result` is the result of this process, for the
    samples that it computed. `task` supplies data, model and loss. `step` is the number of the training step, from 1.
    `ranks` are the processes. If every process has computed all samples, `result` is returned unchanged.

    Every process computes all samples if there is only one process, or if the loss compares the samples of a batch with
    each other (`separable` is False).
    """
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
    """Measure the held-out samples on all processes. Yield a pair (micro-batch, values) for each micro-batch (samples
    computed at once), in order. `values` maps each table column to a list with one value per sample. `held_out` reads
    the micro-batches from disk. `training` is the model with its adapter. `ranks` are the processes. Each process
    measures a part of the micro-batches, but yields all pairs. If `stopped()` returns True, the iterator ends early.

    In each round, every process measures one micro-batch. `stopped()` is called before each round.
    """
    coming: list[Any] = []
    batches = held_out.micro_batches()
    while coming := list(islice(batches, ranks.size)):
        if stopped():
            return
        own = training.measure(coming[ranks.rank]) if ranks.rank < len(coming) else {}
        yield from zip(coming, ranks.each(own)[: len(coming)], strict=True)  # the last round may leave ranks without a batch
