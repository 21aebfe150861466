"""One optimizer step on a chain of blocks: gradients of micro-batches, clipping, the optimizer, the adapter's running average.

A step needs a model, its targets and settings, but no project. Training, `latentmill memory` and benchmarks use this code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from stages.tuner.adapters.initial import fresh_adapter, start_from_adapter, target_weights
from stages.tuner.adapters.stacks import Stacks
from stages.tuner.adapters.targets import Target, matches_pattern, select_targets, similar_names, target_scales
from stages.tuner.blockwise.backprop import Plan, Values, loss_and_grads, predict
from stages.tuner.blockwise.chain import Arrays
from stages.tuner.blockwise.device import live_memory_limit
from stages.tuner.blockwise.meter import Meter
from stages.tuner.config import TrainingConfig, longest_first
from stages.tuner.contrastive.gradcache import loss_and_grads_in_parts
from stages.tuner.optimizers import ema
from stages.tuner.optimizers.step import OptimizerStep, global_norm, is_finite
from stages.tuner.ranks import Ranks
from stages.tuner.step_gradient import StepGradient
from stages.tuner.task import InitialAdapter, MicroBatch, Model, Objective, Term


def choose_targets(linears: Mapping[str, tuple[int, int]], config: TrainingConfig) -> list[Target]:
    """Choose the Linears that get an adapter, in the order of `linears`. `linears` maps the full name of every Linear of the
    model's blocks to its shape (outputs, inputs). `config` holds the [train] settings that choose among them. Each returned
    Target holds the name, rank and alpha of one adapter. Raises ValueError if a pattern in the settings matches no Linear.
    """
    for pattern in config.base_bits_for or {}:
        if not any(matches_pattern(name, pattern) for name in linears):
            raise ValueError(f"[train] base_bits_for: {pattern!r} matches no Linear{similar_names(pattern, linears)}")
    try:
        return select_targets(
            linears,
            config.targets,
            config.rank,
            config.alpha,
            ranks=longest_first(config.rank_for),
            alphas=longest_first(config.alpha_for),
            variant=config.variant,
            rslora=config.rslora,
            factor=config.factor,
            whole=config.trained_whole,
        )
    except ValueError as error:
        raise ValueError(f"[train] {error}") from None


def starting_adapter(
    model: Model, targets: Sequence[Target], config: TrainingConfig, start: InitialAdapter | None = None
) -> Arrays:
    """Return the adapter with which training starts, as float32 arrays by name. `model` holds the frozen weights. `targets` are
    the Linears to adapt. `config` holds the settings [train]. If `start` is None, the adapter does not change the model yet. If
    `start` is a pair (arrays by name, scale of each Linear), it changes the model as these arrays do. Raises ValueError if
    `start` does not fit `targets`.
    """
    weights = target_weights(model.blocks, targets) if config.variant == "dora" else None
    fresh = fresh_adapter(targets, config.seed, weights)
    return start_from_adapter(*start, targets, fresh, weights) if start else fresh


def build_optimizer(config: TrainingConfig) -> OptimizerStep:
    """Return a new optimizer as the settings [train.optimizer] in `config` describe it. It clips gradients. With
    [train.ema], it also keeps a running average of the adapter.
    """
    method = config.optimizer.method()
    return OptimizerStep(ema.Averaged(method, config.ema.decay) if config.ema else method, config.clip)


@dataclass
class StepResult:
    """The losses of one optimizer step, and whether the step was sound. `losses` has one loss per sample, in order.
    `grad_norm` is the global norm of the gradient before clipping. If a loss or the gradient is not finite, `finite` is
    False and nothing was updated. `bounded` is False if the adapter or the optimizer's state is no longer finite.

    `terms` maps a table column to further losses and values, one per sample. `update_ratio` is the length of the update
    divided by the adapter's length, or None if not requested. `largest_tokens` is the number of tokens of the largest
    micro-batch.
    """

    losses: list[float]
    terms: dict[str, list[Any]]  # further terms of the loss and values, by column; None: the sample has no such term
    grad_norm: float  # global norm of the gradient before clipping
    finite: bool  # False: a loss or the gradient is not finite, and nothing was updated
    bounded: bool  # False: the update made the adapter or the optimizer's state infinite
    update_ratio: float | None  # length of the update divided by the adapter's; None if not requested
    largest_tokens: int  # tokens of the largest micro-batch that was computed at once


class TrainingStep:
    """A model, its adapter, and the state of the optimizer. Each call of `step` updates the adapter once. Four
    attributes control memory and may be changed at any time. `plan` says which blocks of the model keep their
    activations until the backward pass: "whole" (all blocks), "blocks" (only the last block), or a number n (the last n
    blocks). While `live_bytes` bytes or more are in use, MLX starts no further operation. `max_tokens` and
    `max_samples` limit the size of a micro-batch (samples computed at once). For these three limits, None means no
    limit.

    The plan "blocks" has its name because the backward pass computes the activations of the other blocks again, block
    by block.
    """

    def __init__(
        self,
        model: Model,
        objective: Objective[Any],
        targets: Sequence[Target],
        config: TrainingConfig,
        adapter: Arrays,
        state: Arrays | None = None,
    ) -> None:
        """Prepare training of an adapter on `model`. `targets` lists the Linears that have adapters. `objective` is the
        loss. `config` holds the settings [train]. `adapter` maps names to the float32 arrays to train. `state` is an
        earlier state of the optimizer; with None, the optimizer starts anew.
        """
        self.model, self.objective, self.config = model, objective, config
        self.targets, self.scales = list(targets), target_scales(targets)
        self.optimizer = build_optimizer(config)
        self.masters = Stacks.of(adapter)
        self.state = self.optimizer.init(self.masters) if state is None else state
        mx.eval(self.masters.arrays, self.state)
        self.ranks = Ranks()
        self.plan: Plan = "whole"
        self.live_bytes: int | None = None
        self.max_tokens: int | None = None
        self.max_samples: int | None = config.micro_batch if isinstance(config.micro_batch, int) else None

    @property
    def adapter(self) -> Arrays:
        """Return the trained adapter as float32 arrays by name. They share memory with the training state, so use them
        before the next step.
        """
        return self.masters.unstack()

    @property
    def average(self) -> Arrays | None:
        """The running average of the adapter over the steps: float32 arrays by name. It is None without [train.ema]."""
        return self.optimizer.average(self.masters, self.state) or None

    def step(self, batches: Sequence[MicroBatch], lr: float, ratio: bool = False, meter: Meter | None = None) -> StepResult:
        """Update the adapter once with the mean gradient over all samples of `batches`. Returns the losses and further
        results of the step. If a loss or the gradient is not finite, the adapter stays unchanged. `lr` is the learning rate.
        If `ratio` is true, the result also holds the length of the update divided by the length of the adapter. A `meter`
        measures the phases of the step: batch, gradients, optimizer.

        The call waits for the device once, at its end. With a `meter`, it waits after each phase.
        """
        with live_memory_limit(self.live_bytes):
            found = self.gradient(batches, meter)
            losses = found.losses
            with _phase(meter, "optimizer"):
                before = dict(self.masters.arrays) if ratio else None  # the update consumes the arrays
                finite = self.ranks.everywhere(mx.all(mx.isfinite(losses)))
                self.masters, self.state, norm, done = self.optimizer(
                    self.masters, found.grads, self.state, lr, finite, self._over_ranks
                )
                length = None if before is None else update_ratio(before, self.masters.arrays)
                bounded = is_finite(self.masters.arrays, self.state)
                values = [value for terms in found.terms for value, _, _ in terms.values()]
                mx.eval(self.masters.arrays, self.state, norm, losses, values, done, bounded, length)
        numbers: Any = [value.item() for value in (norm, done, bounded)]
        ratio_found: Any = None if length is None else length.item()
        each: Any = losses.tolist()
        return StepResult(
            losses=each,
            terms={column: found.values(column) for terms in found.terms for column in terms if column != "loss"},
            grad_norm=numbers[0],
            finite=numbers[1],
            bounded=numbers[2],
            update_ratio=ratio_found,
            largest_tokens=found.largest_tokens,
        )

    def gradient(self, batches: Sequence[MicroBatch], meter: Meter | None = None) -> StepGradient:
        """Return the gradient of the mean loss over all samples of `batches`, together with the losses. Nothing is updated. If
        `meter` is None, the arrays may not be computed yet. If it is a `Meter`, the arrays are computed, and it records the
        memory of each phase.

        The batches are divided into micro-batches (samples computed at once). Their size changes the gradient only by rounding.
        With several ranks (processes) and a loss that can be divided, `batches` is this rank's share of the step, and the
        gradient of the step is the mean over all ranks. For other losses, it is the sum over all ranks.
        """
        count = sum(len(batch.samples) for batch in batches)
        adapter = cast_adapter(self.masters, self.model.dtype, self.config)
        found = StepGradient()
        for batch in self.split(batches):
            found.largest_tokens = max(found.largest_tokens, min(self.most(batch), len(batch.samples)) * batch.tokens)
            found.terms.append({})
            for term in self._terms(batch, meter):
                with _phase(meter, "gradients"):
                    losses_B, grads = self._loss_and_grads(batch, term, adapter)
                    found.add(grads, len(batch.samples) / count)
                    found.note(term, losses_B)
                    if meter:
                        mx.eval(losses_B, found.grads)
                del grads, term  # frees memory before the next term is built
        return found

    def _over_ranks(self, gradients: Arrays) -> Arrays:
        """Return the gradients of the whole step, by name, summed over the ranks (processes). `gradients` are consumed."""
        return self.ranks.sum(gradients, 1 / self.ranks.size if self.objective.separable else 1.0)

    def _loss_and_grads(self, batch: MicroBatch, term: Term, adapter: Arrays) -> tuple[mx.array | Values, Arrays]:
        """Return (losses, gradients) of one loss term for one micro-batch (samples computed at once). `batch` is the
        micro-batch, and `term` is the loss term. `adapter` maps names to the adapter's arrays, and the gradients have
        the same names. Some losses compare all samples of a batch, and have no rule for computing them in parts
        (`term.division` is None). For these losses, ValueError is raised if [train] `micro_batch` is set, or if there
        are several ranks (processes).

        A term that compares samples and has a `division` is computed in parts if the micro-batch is too large.
        """
        whole = self.objective.separable or term.division is None
        if whole and self.ranks.size > 1 and not self.objective.separable:
            raise ValueError("train: this loss compares all samples of a batch, and cannot be divided among ranks")
        if self.config.micro_batch is not None and whole and not self.objective.separable:
            raise ValueError("[train] micro_batch must be unset: the loss compares all samples of a batch with each other")
        if term.division is None or whole or self.most(batch) >= len(batch.samples):
            return loss_and_grads(self.model, adapter, self.scales, term.inputs, term.loss, self.plan)
        parts, join = term.division.parts(self.most(batch)), term.division.join
        return loss_and_grads_in_parts(self.model, adapter, self.scales, parts, join, term.loss, self.plan, self.ranks)

    def _terms(self, batch: MicroBatch, meter: Meter | None) -> Iterator[Term]:
        """Yield the terms of the loss for one micro-batch (samples computed at once), one after another. The loss is the
        sum of its terms. With a `meter`, the inputs of each term are computed before the term is yielded, and their time
        and memory are recorded as the phase "batch".
        """
        if meter is None:
            yield from self.objective.terms(self.model, batch)
            return
        terms = self.objective.terms(self.model, batch)
        while True:
            with meter.phase("batch"):
                term = next(terms, None)
                if term:
                    mx.eval(dict(term.inputs), getattr(term.loss, "keywords", {}))
            if term is None:
                meter.rows.pop()  # the end of the terms is no phase
                return
            yield term

    def split(self, batches: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the micro-batches (samples computed at once) of one step, in order. A batch larger than `max_samples`
        or `max_tokens` is divided. It stays whole if the loss compares its samples with each other.

        Such a whole batch is divided later, during the computation of each loss term.
        """
        for batch in batches:
            count, most = len(batch.samples), self.most(batch)
            if most >= count or not self.objective.separable:
                yield batch
            else:
                yield from (batch.select(start, min(start + most, count)) for start in range(0, count, most))

    def most(self, batch: MicroBatch) -> int:
        """Return how many samples of `batch` may be computed at once, at least 1. The attributes `max_samples` and
        `max_tokens` set this limit.
        """
        count = len(batch.samples)
        most = min(self.max_samples or count, max(1, self.max_tokens // batch.tokens) if self.max_tokens else count)
        if self.ranks.size == 1 or self.objective.separable:
            return most
        share = count // self.ranks.size  # every rank encodes equally many parts of equal size
        return next(size for size in range(min(most, share), 0, -1) if share % size == 0)

    def measure(self, batch: MicroBatch) -> dict[str, list[Any]]:
        """Return the validation results of the held-out micro-batch `batch` as a dict: table column -> one value per
        sample. The column "loss" is always present. The results are computed with the current adapter. Nothing is
        updated.

        A term that can be computed in parts is, in parts of as many samples as the settings alone decide.
        """
        with live_memory_limit(self.live_bytes):
            term = self.objective.validation_term(self.model, batch)
            adapter = self.adapter
            if term.division:
                parts = term.division.parts(self.config.measured_at_once)
                prediction = term.division.join([predict(self.model, adapter, self.scales, part) for part in parts])
            else:
                prediction = predict(self.model, adapter, self.scales, term.inputs)
            found = StepGradient(terms=[{}])
            found.note(term, term.loss(prediction))
            return {column: found.values(column) for column in found.terms[0]}


def cast_adapter(masters: Stacks, dtype: mx.Dtype, config: TrainingConfig) -> Arrays:
    """Return the adapter's arrays by name, in the dtype that the model's blocks expect. `masters` holds the float32 arrays.
    `config` holds the settings [train]. If its `base_bits` is 16, matrices are cast to `dtype`. If it is 8 or 4, nothing is cast.

    With 8 or 4 bits, each Linear casts its own arrays when it is computed. A cast copy of the whole adapter needs more memory.
    """
    return (masters.cast(dtype) if config.base_bits == 16 else masters).unstack()


def update_ratio(before: Arrays, after: Arrays) -> mx.array:
    """Return the norm of an update divided by the norm of the adapter before it, as a scalar array. Each norm is the
    Euclidean norm of all arrays together. `before` and `after` are the adapter before and after a step, as arrays by
    name.
    """
    change = global_norm({name: after[name] - before[name] for name in before})
    return change / mx.maximum(global_norm(before), 1e-30)


def _phase(meter: Meter | None, name: str) -> AbstractContextManager[None]:
    return meter.phase(name) if meter else nullcontext()
