"""One optimizer step on a chain of blocks: gradients of micro-batches, clipping, the optimizer, the adapter's running average.

A step needs a model, its targets and settings, but no project. Training, `latentmill memory` and benchmarks use this code.
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
        )
    except ValueError as error:
        raise ValueError(f"[train] {error}") from None


def starting_adapter(
    model: Model, targets: Sequence[Target], config: TrainingConfig, start: InitialAdapter | None = None
) -> Arrays:
    """Return the adapter that training starts from: float32 arrays by name. `start` is a loaded adapter: its arrays by name, and
    the scale of each Linear. If it is given, the returned adapter makes the same change as `start`. If it is None, the returned
    adapter does not change the model yet. Raises ValueError if `start` does not fit `targets`.
    """
    weights = target_weights(model.blocks, targets) if config.variant == "dora" else None
    fresh = fresh_adapter(targets, config.seed, weights)
    return start_from_adapter(*start, targets, fresh, weights) if start else fresh


def build_optimizer(config: TrainingConfig) -> OptimizerStep:
    """Build the optimizer that the section [train.optimizer] of `config` describes, with gradient clipping. With [train.ema], the
    optimizer also keeps a running average of the adapter.
    """
    method = config.optimizer.method()
    return OptimizerStep(ema.Averaged(method, config.ema.decay) if config.ema else method, config.clip)


@dataclass
class StepResult:
    """The losses of one optimizer step and the state of the adapter after it. `losses` has one loss per sample, in order. `terms`
    has further losses by table column. `grad_norm` is the gradient's global norm before clipping. `finite` is False if a loss or
    the gradient is not finite. In this case nothing was updated. `bounded` is False if the update made the adapter or the
    optimizer's state infinite. `update_ratio` is the length of the update divided by the adapter's length, or None if not
    requested. `largest_tokens` is the number of tokens of the largest micro-batch.
    """

    losses: list[float]
    terms: dict[str, list[float | None]]  # further terms of the loss, by column; None: the sample has no such term
    grad_norm: float  # global norm of the gradient before clipping
    finite: bool  # False: a loss or the gradient is not finite, and nothing was updated
    bounded: bool  # False: the update made the adapter or the optimizer's state infinite
    update_ratio: float | None  # length of the update divided by the adapter's; None if not requested
    largest_tokens: int  # tokens of the largest micro-batch that was computed at once


@dataclass
class StepGradient:
    """The gradient of one optimizer step, summed over its micro-batches (samples computed at once). `grads` maps the name of an
    adapter array to its gradient. `terms` has one dict per micro-batch: table column -> (losses, flags). The losses are one per
    sample. The flags say which samples have the term, or are None if all have it. All arrays are lazy: not evaluated yet.
    """

    grads: Arrays = field(default_factory=dict)
    terms: list[dict[str, tuple[mx.array, Sequence[bool] | None]]] = field(default_factory=list)  # per micro-batch, by column
    largest_tokens: int = 0

    @property
    def losses(self) -> mx.array:
        """The main loss of every sample of the step, in order, as one array. Further loss terms are left out."""
        return mx.concatenate([terms["loss"][0] for terms in self.terms])

    def values(self, column: str) -> list[float | None]:
        """Return one value per sample for the loss term of the table column `column`. The values are in the order of the step. If
        a sample does not have this term, its value is None.
        """
        found: list[float | None] = []
        for terms in self.terms:
            losses_B, applies = terms.get(column, (None, None))
            values: Any = [None] * terms["loss"][0].size if losses_B is None else losses_B.tolist()
            found += values if applies is None else [v if a else None for v, a in zip(values, applies, strict=True)]
        return found

    def add(self, grads: Arrays, share: float) -> None:
        """Add `share` times the gradients `grads` of one loss term to the sum. The dict `grads` is consumed and must not be used
        afterwards. `share` is the micro-batch's share of the step's samples, 0 to 1.

        A third copy of the gradient would raise the peak of memory.
        """
        if share < 1 or self.grads:
            for name in grads:
                grads[name] = share * grads[name].astype(mx.float32) + self.grads.pop(name, 0.0)
            dispatch(grads)  # else the gradient of every micro-batch would wait for the last one
        self.grads = grads


class TrainingStep:
    """A model with its adapter and optimizer state. Each call of `step` updates the adapter and the state once. Four
    attributes may be set after construction. `plan` says how many of the last blocks keep their activations until the
    backward pass: "whole" (all), "blocks" (one) or a number. While `live_bytes` bytes or more are in use, MLX starts no
    further operation. `max_tokens` and `max_samples` limit the size of a micro-batch (samples computed at once). Each
    of these three limits may be None, which means that it is not set.
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
        """Create a step for the Linears `targets` of `model`. `objective` is the loss. `config` holds the settings [train].
        `adapter` maps names to the float32 arrays to train. `state` is the optimizer's state to continue from, or None for the
        initial state. Raises ValueError if [train] `micro_batch` is set but `objective` needs whole batches.
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
        """The trained adapter: float32 arrays by name. The arrays are views and valid only until the next step."""
        return self.masters.unstack()

    @property
    def average(self) -> Arrays | None:
        """The running average of the adapter over the steps: float32 arrays by name. It is None without [train.ema]."""
        return self.optimizer.average(self.masters, self.state) or None

    def step(self, batches: Sequence[MicroBatch], lr: float, ratio: bool = False, meter: Meter | None = None) -> StepResult:
        """Update the adapter once with the mean gradient over all samples of `batches`. Returns the losses and further results of
        the step. If a loss or the gradient is not finite, the adapter stays unchanged. `lr` is the learning rate. If `ratio` is
        true, the result also holds the length of the update divided by the length of the adapter. A `meter` measures the phases
        of the step: batch, gradients, optimizer.

        The call waits for the device once, at its end. With a `meter`, it waits after each phase.
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
        """Return the gradient of the mean loss over all samples of `batches`, without an update. The batches are
        divided into micro-batches (samples computed at once). The size of the micro-batches changes the gradient only
        by rounding. If a `meter` is given, it measures each phase, and the gradient is computed on return. Otherwise
        the returned arrays may not be computed yet.
        """
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
                del grads, term  # frees memory before the next term is built
        return found

    def _terms(self, batch: MicroBatch, meter: Meter | None) -> Iterator[Term]:
        """Yield the terms of the loss of micro-batch `batch`. If a `meter` is given, the inputs of every term are evaluated.
        Their preparation is then measured as a phase named "batch".
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
        """Yield the micro-batches (samples computed at once) of a step, in order. A batch is divided if it is larger than
        `max_samples` or `max_tokens` allow. It stays whole if the loss compares its samples with each other.
        """
        for batch in batches:
            count = len(batch.samples)
            most = min(self.max_samples or count, max(1, self.max_tokens // batch.tokens) if self.max_tokens else count)
            if most >= count or not self.objective.separable:
                yield batch
            else:
                yield from (batch.select(start, min(start + most, count)) for start in range(0, count, most))

    def measure(self, batch: MicroBatch) -> list[float]:
        """Return the validation loss of every sample of the held-out micro-batch `batch`, computed with the present adapter.
        Nothing is updated.
        """
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
    """Return the prediction of `model` without an adapter. `inputs` are the keyword arguments of `model.enter`. The function does
    not wait for the device: the returned array may still be in computation.
    """
    h, shared = model.enter(**inputs)
    for block in model.blocks:
        h = model.block(block.kind)(block.weights, h, shared, lora.adapted_linear({}, {}))
        dispatch(h)
    prediction: mx.array = model.leave(h, shared)
    dispatch(prediction)  # else its graph would become part of the gradient's
    return prediction


def cast_adapter(masters: Stacks, dtype: mx.Dtype, config: TrainingConfig) -> Arrays:
    """Return the adapter's arrays by name, for use in the model's blocks. `masters` holds the float32 arrays of the
    adapter as stacks (arrays of equal shape, joined). If [train] `base_bits` is 16, matrices are cast to `dtype`, and
    other arrays stay float32. If it is 8 or 4, all arrays stay float32.

    With 8 or 4 bits, each Linear casts its own arrays when it is computed. This needs less memory than a cast copy of
    the whole adapter.
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
