"""One optimizer step on a chain of blocks. Needs a model, targets and settings, but no project."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from stages.kernels import dispatch
from stages.tuner.adapters import lora
from stages.tuner.adapters.lora import Scale
from stages.tuner.adapters.targets import (
    Target,
    fresh_adapter,
    matches_pattern,
    select_targets,
    similar_names,
    start_from_adapter,
    target_scales,
    target_weights,
)
from stages.tuner.blockwise.backprop import Values, loss_and_grads, main_losses, predict
from stages.tuner.blockwise.device import live_memory_limit
from stages.tuner.blockwise.meter import Meter
from stages.tuner.config import TrainingConfig
from stages.tuner.contrastive import loss_and_grads_in_parts
from stages.tuner.memory import MemoryPlan, adjust_max_tokens
from stages.tuner.optimizers.step import Averaged, OptimizerStep, Stacks, averages, global_norm, is_finite, unstack
from stages.tuner.ranks import Ranks
from stages.tuner.task import InitialAdapter, MicroBatch, Model, Objective, Term
from stages.tuner.weights import Arrays

TRAINED_PREFIX = "trained."  # keys in a checkpoint's state
Found = tuple[mx.array, Sequence[bool] | None, Sequence[str] | None]  # values, which samples have them, texts that they index


def choose_targets(linears: Mapping[str, tuple[int, int]], config: TrainingConfig) -> list[Target]:
    """`linears`: name -> (outputs, inputs). Raises ValueError if a pattern in the settings matches no Linear."""
    for pattern in config.base_bits_for or {}:
        if not any(matches_pattern(name, pattern) for name in linears):
            raise ValueError(f"[train] base_bits_for: {pattern!r} matches no Linear{similar_names(pattern, linears)}")
    try:
        return select_targets(
            linears,
            config.targets,
            config.rank,
            config.alpha,
            ranks=config.rank_for,
            alphas=config.alpha_for,
            variant=config.variant,
            rslora=config.rslora,
            factor=config.factor,
            orthogonal=config.orthogonal,
            whole=config.trained_whole,
        )
    except ValueError as error:
        raise ValueError(f"[train] {error}") from None


def starting_adapter(
    model: Model, targets: Sequence[Target], config: TrainingConfig, start: InitialAdapter | None = None
) -> Arrays:
    """Without `start`, the adapter changes nothing yet. Raises ValueError if `start` does not fit."""
    weights = target_weights(model.blocks, targets) if config.variant == "dora" else None
    fresh = fresh_adapter(targets, config.seed, weights)
    return start_from_adapter(*start, targets, fresh, weights) if start else fresh


def resumed(adapter: Arrays, state: Arrays) -> tuple[Arrays, Arrays | None]:
    """(arrays to train, optimizer's state) from the arrays of a checkpoint."""
    trained = {name.removeprefix(TRAINED_PREFIX): a for name, a in state.items() if name.startswith(TRAINED_PREFIX)}
    return trained or adapter, {name: a for name, a in state.items() if not name.startswith(TRAINED_PREFIX)}


def build_optimizer(config: TrainingConfig) -> OptimizerStep:
    method = config.optimizer.method()
    return OptimizerStep(Averaged(method, config.ema.decay) if config.ema else method, config.clip, config.optimizer.lr_ratio)


@dataclass
class StepGradient:
    """The gradient of one optimizer step, and the values of its samples by table column. All arrays are lazy."""

    grads: Arrays = field(default_factory=dict)  # summed over the micro-batches
    terms: list[dict[str, Found]] = field(default_factory=list)  # per micro-batch, by column
    largest_tokens: int = 0

    @property
    def losses(self) -> mx.array:
        return mx.concatenate([terms["loss"][0] for terms in self.terms])

    def values(self, column: str) -> list[Any]:
        """One Python value per sample; a negative index into texts is None."""
        found: list[Any] = []
        for terms in self.terms:
            if column not in terms:
                found += [None] * terms["loss"][0].size
                continue
            values, applies, texts = terms[column]
            each: Any = values.tolist()
            if texts is not None:
                each = [texts[n] if n >= 0 else None for n in each]
            found += each if applies is None else [v if a else None for v, a in zip(each, applies, strict=True)]
        return found

    def note(self, term: Term, found: mx.array | Values) -> None:
        names = term.names or {}
        self.terms[-1][term.column] = main_losses(found), term.applies, None
        if isinstance(found, dict):
            more = {column: (value, term.applies, names.get(column)) for column, value in found.items() if column != "loss"}
            self.terms[-1].update(more)

    def add(self, grads: Arrays, share: float) -> None:
        """Add `share` times the gradients of a term. Consumes `grads`. `share`: the micro-batch's part of the step's samples."""
        if share < 1 or self.grads:
            # In place, array by array: a third copy of the gradient would raise the peak of memory.
            for name in grads:
                part = share * grads[name].astype(mx.float32)
                grads[name] = part + self.grads.pop(name) if name in self.grads else part
            dispatch(grads)  # else the gradient of every micro-batch would wait for the last one
        self.grads = grads


@dataclass
class StepResult:
    losses: list[float]  # per sample
    terms: dict[str, list[Any]]  # further terms of the loss and values, by column; None: the sample has no such term
    grad_norm: float  # global norm of the gradient before clipping
    finite: bool  # False: a loss or the gradient is not finite, and nothing was updated
    bounded: bool  # False: the update made the adapter or the optimizer's state infinite
    update_ratio: float | None  # length of the update divided by the adapter's; None if not requested
    largest_tokens: int  # tokens of the largest micro-batch that was computed at once


class TrainingStep:
    def __init__(
        self,
        model: Model,
        objective: Objective[Any],
        targets: Sequence[Target],
        config: TrainingConfig,
        adapter: Arrays,
        state: Arrays | None = None,
        memory: MemoryPlan | None = None,
    ) -> None:
        self.model, self.objective, self.config = model, objective, config
        self.targets, self.scales = list(targets), target_scales(targets)
        self.optimizer = build_optimizer(config)
        trained, self.frozen = lora.split_start(adapter)
        self.masters = Stacks.of(trained, self.optimizer.apart)
        self.state = self.optimizer.method.init(self.masters.arrays) if state is None else state
        mx.eval(self.masters.arrays, self.state, self.frozen)
        self.ranks = Ranks()
        # May be changed between steps.
        self.memory = memory or MemoryPlan(max_samples=config.micro_batch if isinstance(config.micro_batch, int) else None)
        self.earlier_peak = 0  # bytes: the peak before MLX's own count was last reset

    @property
    def arrays(self) -> Arrays:
        """The arrays that are trained, and frozen ones of an orthogonal start. They share memory with the training state: use
        them before the next step.
        """
        return self.masters.unstack() | self.frozen

    @property
    def adapter(self) -> Arrays:
        """As files hold it, and as it is drawn. Shares memory as `arrays` does."""
        return lora.as_stored(self.arrays)

    @property
    def average(self) -> Arrays | None:
        average = averages(self.state)
        return lora.as_stored(unstack(average, self.masters.groups) | self.frozen) if average else None

    @property
    def resumable(self) -> Arrays:
        """What a checkpoint holds besides the adapter, to go on from: the optimizer's state, and what `adapter` does not tell."""
        hidden = self.arrays if self.frozen else {}
        return self.state | {TRAINED_PREFIX + name: value for name, value in hidden.items()}

    @property
    def peak(self) -> int:
        """Bytes, over all steps."""
        return max(self.earlier_peak, mx.get_peak_memory())

    def step(self, batches: Sequence[MicroBatch], lr: float, ratio: bool = False, meter: Meter | None = None) -> StepResult:
        """Update by the mean gradient of all samples if all is finite. Waits once, at the end; with `meter`, after each phase.

        A step that raises changes nothing, and may be repeated.
        """
        if self.memory.max_tokens is not None:
            # `adjust_micro_batch` wants the peak of this step alone, so MLX's count is reset.
            self.earlier_peak = self.peak
            mx.reset_peak_memory()
        with live_memory_limit(self.memory.live_bytes):
            found = self.gradient(batches, meter)
            losses = found.losses
            with _phase(meter, "optimizer"):
                # Decided on the device: a host check here would stall the optimizer until all gradients are computed.
                finite = self.ranks.everywhere(mx.all(mx.isfinite(losses)))
                reduce = functools.partial(self.ranks.sum, share=1 / self.ranks.size if self.objective.separable else 1.0)
                masters, state, norm, done = self.optimizer(self.masters, found.grads, self.state, lr, finite, reduce)
                length = update_ratio(self.masters.arrays, masters.arrays) if ratio else None
                bounded = is_finite(masters.arrays, state)
                values = [value for terms in found.terms for value, _, _ in terms.values()]
                mx.eval(masters.arrays, state, norm, losses, values, done, bounded, length)
                # Only now: a step that fails must leave the state of the step before.
                self.masters, self.state = masters, state
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

    def adjust_micro_batch(self, used: int) -> str:
        """If micro_batch is "auto", the last step's peak at `used` tokens at once sets the next size. Text for the user or ""."""
        before, limit = self.memory.max_tokens, self.memory.limit
        if before is None or not self.memory.grows:
            return ""
        after = adjust_max_tokens(before, used, mx.get_active_memory(), mx.get_peak_memory(), limit)
        self.memory = replace(self.memory, max_tokens=after)
        return (
            ""
            if after == before
            else f"the micro-batch is now {after} tokens, {'fewer' if after < before else 'more'} than before"
        )

    def share_state(self) -> None:
        """Gives all ranks the adapter and the state of rank 0: chips of different kinds round an update differently."""
        if self.ranks.size == 1:
            return
        parts = self.masters.arrays, self.state, self.frozen
        arrays, state, frozen = ({name: np.array(a) for name, a in part.items()} for part in parts)
        given = self.masters.groups, arrays, state, frozen
        groups, arrays, state, frozen = self.ranks.first(given if self.ranks.leads else None) or given
        if not self.ranks.leads:
            self.masters = Stacks(groups, {name: mx.array(value) for name, value in arrays.items()})
            self.state, self.frozen = ({name: mx.array(value) for name, value in part.items()} for part in (state, frozen))
            mx.eval(self.masters.arrays, self.state, self.frozen)

    def gradient(self, batches: Sequence[MicroBatch], meter: Meter | None = None) -> StepGradient:
        """Lazy. With ranks, of this rank's share: the step's gradient is the mean over ranks (the sum, if not separable)."""
        count = sum(len(batch.samples) for batch in batches)
        # With packed weights, each Linear casts its own arrays as it is computed: a cast copy of the adapter takes more memory.
        cast = self.config.base_bits == 16 and not self.frozen  # what is subtracted first must not be rounded before
        adapter = (self.masters.cast(self.model.dtype) if cast else self.masters).unstack() | self.frozen
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

    def _loss_and_grads(self, batch: MicroBatch, term: Term, adapter: Arrays) -> tuple[mx.array | Values, Arrays]:
        # Terms that compare all samples can be divided only by their own rule.
        whole = self.objective.separable or term.division is None
        if whole and self.ranks.size > 1 and not self.objective.separable:
            raise ValueError("train: this loss compares all samples of a batch, and cannot be divided among ranks")
        if self.config.micro_batch is not None and whole and not self.objective.separable:
            raise ValueError("[train] micro_batch must be unset: the loss compares all samples of a batch with each other")
        scales: dict[str, Scale] = {name: scale * term.strength for name, scale in self.scales.items()}
        if term.masks:
            scales |= {name: scales[name] * mask_BR for name, mask_BR in term.masks(self.targets).items()}
        if term.division is None or whole or self.most(batch) >= len(batch.samples):
            return loss_and_grads(self.model, adapter, scales, term.inputs, term.loss, self.memory.plan)
        parts, join = term.division.parts(self.most(batch)), term.division.join
        return loss_and_grads_in_parts(self.model, adapter, scales, parts, join, term.loss, self.memory.plan, self.ranks)

    def _terms(self, batch: MicroBatch, meter: Meter | None) -> Iterator[Term]:
        if meter is None:
            yield from self.objective.terms(self.model, batch)
            return
        terms = self.objective.terms(self.model, batch)
        while True:
            with meter.phase("batch"):
                term = next(terms, None)
                if term:
                    # With the arrays that `functools.partial` has bound, so that the phase has all of its work.
                    mx.eval(dict(term.inputs), getattr(term.loss, "keywords", {}))
            if term is None:
                meter.rows.pop()  # the end of the terms is no phase
                return
            yield term

    def split(self, batches: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
        """Micro-batches. A loss that compares samples is divided later, term by term."""
        for batch in batches:
            count, most = len(batch.samples), self.most(batch)
            if most >= count or not self.objective.separable:
                yield batch
            else:
                yield from (batch.select(start, min(start + most, count)) for start in range(0, count, most))

    def most(self, batch: MicroBatch) -> int:
        """How many samples of a batch may be computed at once, at least 1."""
        count, memory = len(batch.samples), self.memory
        most = min(memory.max_samples or count, max(1, memory.max_tokens // batch.tokens) if memory.max_tokens else count)
        if self.ranks.size == 1 or self.objective.separable:
            return most
        share = count // self.ranks.size  # every rank encodes equally many parts of equal size
        return next(size for size in range(min(most, share), 0, -1) if share % size == 0)

    def measure(self, batch: MicroBatch) -> dict[str, list[Any]]:
        """Column -> one value per held-out sample, with the current adapter."""
        with live_memory_limit(self.memory.live_bytes):
            term = self.objective.validation_term(self.model, batch)
            adapter = self.adapter
            # In parts whose size the settings alone decide: free memory must not change a measurement.
            if term.division:
                parts = term.division.parts(self.config.measured_at_once)
                prediction = term.division.join([predict(self.model, adapter, self.scales, part) for part in parts])
            else:
                prediction = predict(self.model, adapter, self.scales, term.inputs)
            found = StepGradient(terms=[{}])
            found.note(term, term.loss(prediction))
            return {column: found.values(column) for column in found.terms[0]}


def _phase(meter: Meter | None, name: str) -> AbstractContextManager[None]:
    return meter.phase(name) if meter else nullcontext()


def update_ratio(before: Arrays, after: Arrays) -> mx.array:
    change = global_norm({name: after[name] - before[name] for name in before})
    return change / mx.maximum(global_norm(before), 1e-30)
