"""One optimizer step on a chain of blocks: gradients of micro-batches, clipping, the optimizer, its average.

It is built from a model, its targets and settings, and needs no project: training, `latentmill memory` and benchmarks run it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from stages.tuner.adapters import lora
from stages.tuner.adapters.initial import fresh_adapter, start_from_adapter, target_weights
from stages.tuner.adapters.stacks import Stacks
from stages.tuner.adapters.targets import Target, matches_pattern, select_targets, similar_names, target_scales
from stages.tuner.blockwise.backprop import Arrays, BlockwiseBackprop, Plan, loss_and_grads
from stages.tuner.blockwise.device import dispatch, live_memory_limit
from stages.tuner.blockwise.meter import Meter
from stages.tuner.config import TrainingConfig, longest_first
from stages.tuner.optimizers import ema
from stages.tuner.optimizers.step import OptimizerStep, global_norm, is_finite
from stages.tuner.task import InitialAdapter, MicroBatch, Model, Objective, Term


def choose_targets(linears: Mapping[str, tuple[int, int]], config: TrainingConfig) -> list[Target]:
    """Choose the Linears that get an adapter, in the model's order, as [train] says. `linears` maps the full name of every Linear
    of the blocks to (outputs, inputs). ValueError for a pattern that matches none.
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
        )
    except ValueError as error:
        raise ValueError(f"[train] {error}") from None


def starting_adapter(
    model: Model, targets: Sequence[Target], config: TrainingConfig, start: InitialAdapter | None = None
) -> Arrays:
    """Make the adapter before the first step, float32 arrays by name: one that changes nothing yet, or one that makes the same
    change as the adapter `start`.
    """
    weights = target_weights(model.blocks, targets) if config.variant == "dora" else None
    fresh = fresh_adapter(targets, config.seed, weights)
    return start_from_adapter(*start, targets, fresh, weights) if start else fresh


def build_optimizer(config: TrainingConfig) -> OptimizerStep:
    """Build the optimizer of [train.optimizer], with the average of [train.ema] if there is one."""
    method = config.optimizer.method()
    return OptimizerStep(ema.Averaged(method, config.ema.decay) if config.ema else method, config.clip)


@dataclass
class StepResult:
    """What a step returns: losses and the state of its health. Lists have one entry per sample, in the order of the step."""

    losses: list[float]
    terms: dict[str, list[float | None]]  # further terms of the loss, by column; None: the sample has no such term
    grad_norm: float  # global norm of the gradient before clipping
    finite: bool  # False: a loss or the gradient is not finite, and nothing was updated
    bounded: bool  # False: the update made the adapter or the optimizer's state infinite
    update_ratio: float | None  # length of the update divided by the adapter's; None where it was not asked for
    largest_tokens: int  # tokens of the largest micro-batch that was computed at once


@dataclass
class StepGradient:
    """The gradient of a step, arrays by name, and the losses of its micro-batches. All arrays are lazy: not evaluated yet."""

    grads: Arrays = field(default_factory=dict)
    terms: list[dict[str, tuple[mx.array, Sequence[bool] | None]]] = field(default_factory=list)  # by column
    largest_tokens: int = 0

    @property
    def losses(self) -> mx.array:
        """The losses of all samples of the step, in order, without further terms such as preservation."""
        return mx.concatenate([terms["loss"][0] for terms in self.terms])

    def values(self, column: str) -> list[float | None]:
        """The values of one term for all samples, in order; None for samples that it does not apply to."""
        found: list[float | None] = []
        for terms in self.terms:
            losses_B, applies = terms.get(column, (None, None))
            values: Any = [None] * terms["loss"][0].size if losses_B is None else losses_B.tolist()
            found += values if applies is None else [v if a else None for v, a in zip(values, applies, strict=True)]
        return found

    def add(self, grads: Arrays, share: float) -> None:
        """Add the gradient of one term of a micro-batch, times its share of the step's samples. `grads` is emptied. Both are
        consumed array by array: a third copy of the gradient would be the peak of the step's memory.
        """
        if share < 1 or self.grads:
            for name in grads:
                grads[name] = share * grads[name].astype(mx.float32) + self.grads.pop(name, 0.0)
            dispatch(grads)  # else the gradient of every micro-batch would wait for the last one
        self.grads = grads


class TrainingStep:
    """The model, the adapter and the optimizer's state; `step` updates them once. `plan`: which blocks are differentiated as one
    graph. `live_bytes`: bytes that may be live before the next block waits for the device; None: no limit. `max_tokens`,
    `max_samples`: the size of a micro-batch that is computed at once; None: a whole batch.
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
        """`adapter` are the float32 arrays to train, `state` the optimizer's state to go on from; None: the initial state.
        ValueError if [train] micro_batch would divide the batches of an objective that is not separable.
        """
        if config.micro_batch is not None and not objective.separable:
            raise ValueError("[train] micro_batch must be unset: the loss compares all samples of a batch with each other")
        self.model, self.objective, self.config = model, objective, config
        self.targets, self.scales = list(targets), target_scales(targets)
        self.optimizer = build_optimizer(config)
        self.masters = Stacks.of(adapter)
        self.state = self.optimizer.init(self.masters) if state is None else state
        mx.eval(self.masters.arrays, self.state)
        self.plan: Plan = "whole"
        self.live_bytes: int | None = None
        self.max_tokens: int | None = None
        self.max_samples: int | None = config.micro_batch if isinstance(config.micro_batch, int) else None

    @property
    def adapter(self) -> Arrays:
        """The trained arrays by name, float32: views that are valid until the next step."""
        return self.masters.unstack()

    @property
    def average(self) -> Arrays | None:
        """The average of the adapter over the steps, by name; None without [train.ema]."""
        return self.optimizer.average(self.masters, self.state) or None

    def step(self, batches: Sequence[MicroBatch], lr: float, ratio: bool = False, meter: Meter | None = None) -> StepResult:
        """Update the adapter once, by the mean gradient over all samples of `batches`. Nothing is updated if a loss or the
        gradient is not finite. `ratio` asks for the length of the update. The device is awaited once, at the end; with a `meter`,
        after each of the phases batch, gradients and optimizer, which it measures.
        """
        with live_memory_limit(self.live_bytes):
            found = self.gradient(batches, meter)
            losses = found.losses
            with _phase(meter, "optimizer"):
                before = dict(self.masters.arrays) if ratio else None  # the update consumes the arrays
                finite = mx.all(mx.isfinite(losses))
                self.masters, self.state, norm, done = self.optimizer(self.masters, found.grads, self.state, lr, finite)
                length = None if before is None else update_ratio(before, self.masters.arrays)
                bounded = is_finite(self.masters.arrays, self.state)
                mx.eval(self.masters.arrays, self.state, norm, losses, found.terms, done, bounded, length)
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
        """Compute the gradient of the mean loss over all samples, the same for every size of micro-batches up to rounding."""
        count = sum(len(batch.samples) for batch in batches)
        adapter = cast_adapter(self.masters, self.model.dtype, self.config)
        found = StepGradient()
        for batch in self.split(batches):
            found.largest_tokens = max(found.largest_tokens, len(batch.samples) * batch.tokens)
            found.terms.append({})
            for term in self._terms(batch, meter):
                with _phase(meter, "gradients"):
                    losses_B, grads = loss_and_grads(self.model, adapter, self.scales, term.inputs, term.loss, self.plan)
                    found.add(grads, len(batch.samples) / count)
                    found.terms[-1][term.column] = losses_B, term.applies
                    if meter:
                        mx.eval(losses_B, found.grads)
                del grads, term  # before the next term is made
        return found

    def _terms(self, batch: MicroBatch, meter: Meter | None) -> Iterator[Term]:
        """The terms of a micro-batch's loss. With a meter, the making of each is measured as the phase `batch`."""
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
        """Divide the batches of a step into the micro-batches that are computed at once; whole batches if they must not be."""
        for batch in batches:
            count = len(batch.samples)
            most = min(self.max_samples or count, max(1, self.max_tokens // batch.tokens) if self.max_tokens else count)
            if most >= count or not self.objective.separable:
                yield batch
            else:
                yield from (batch.select(start, min(start + most, count)) for start in range(0, count, most))

    def measure(self, batch: MicroBatch) -> list[float]:
        """Compute the validation losses of held-out samples with the present adapter. Nothing is updated."""
        with live_memory_limit(self.live_bytes):
            term = self.objective.validation_term(self.model, batch)
            blocks = BlockwiseBackprop(self.model, self.adapter, self.scales)
            h, shared = self.model.enter(**term.inputs)
            for n in range(len(self.model.blocks)):
                h = blocks.forward(n, h, shared)
                dispatch(h)
            losses: Any = term.loss(self.model.leave(h, shared)).tolist()
        found: list[float] = losses
        return found


def predict_base(model: Model, inputs: Mapping[str, Any]) -> mx.array:
    """Return the prediction of the model without the adapter. `inputs` are the keyword arguments of `model.enter`. The array is
    being computed when the function returns.
    """
    h, shared = model.enter(**inputs)
    for block in model.blocks:
        h = model.block(block.kind)(block.weights, h, shared, lora.adapted_linear({}, {}))
        dispatch(h)
    prediction: mx.array = model.leave(h, shared)
    dispatch(prediction)  # else its graph would become part of the gradient's
    return prediction


def cast_adapter(masters: Stacks, dtype: mx.Dtype, config: TrainingConfig) -> Arrays:
    """Return the adapter as the blocks read it: cast to `dtype` once per step, by name. With a packed base, memory matters more
    than time: the arrays stay float32, and every Linear casts its own at each use.
    """
    return (masters.cast(dtype) if config.base_bits == 16 else masters).unstack()


def update_ratio(before: Arrays, after: Arrays) -> mx.array:
    """Return the length of the difference between two adapters divided by the length of the first, a scalar."""
    change = global_norm({name: after[name] - before[name] for name in before})
    return change / mx.maximum(global_norm(before), 1e-30)


def _phase(meter: Meter | None, name: str) -> AbstractContextManager[None]:
    return meter.phase(name) if meter else nullcontext()
