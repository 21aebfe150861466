"""The reference "plain": a training step whose gradient is MLX's ordinary one of the whole graph, without compilation.

Everything else of the step (objective, clipping, optimizer) is the trainer's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import mlx.core as mx

from stages.models.family import Family
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.train.profile import random_transformer
from stages.text_to_image.train.task import FlowMatching
from stages.tuner.adapters import lora
from stages.tuner.blockwise.meter import Meter
from stages.tuner.step import StepGradient, TrainingStep, choose_targets, starting_adapter
from stages.tuner.task import MicroBatch
from stages.tuner.weights import unpacked

Arrays = dict[str, mx.array]


class PlainTraining(TrainingStep):
    """A training step that ignores `plan`: the whole model is differentiated as one graph, and nothing is compiled."""

    def gradient(self, micros: Sequence[MicroBatch], meter: Meter | None = None) -> StepGradient:
        (micro,) = micros
        phase: Callable[[str], Any] = meter.phase if meter else lambda name: nullcontext()
        with phase("batch"):
            term = next(self.objective.terms(self.model, micro))
            if meter:
                mx.eval(dict(term.inputs))
        with phase("gradients"):
            losses_B, grads = plain_loss_and_grads(self.model, self.adapter, self.scales, term.inputs, term.loss)
            if meter:
                mx.eval(losses_B, grads)
        return StepGradient(grads, [{"loss": (losses_B, None, None)}], micro.tokens)


def random_plain_training(family: Family, config: TrainConfig) -> PlainTraining:
    model = random_transformer(family, config)
    targets = choose_targets(model.linears(), config)
    objective = FlowMatching(family.architecture, config.loss, config.preservation)
    return PlainTraining(model, objective, targets, config, starting_adapter(model, targets, config))


def plain_loss_and_grads(
    model: Any, adapter: Arrays, scales: Mapping[str, float], inputs: Mapping[str, Any], loss: Callable[..., Any]
) -> tuple[mx.array, Arrays]:
    """Return (losses_B, gradient of their mean by adapter name); arguments as for backprop's `loss_and_grads`."""

    def run(adapter: Arrays) -> tuple[mx.array, mx.array]:
        losses_B = loss(model(**inputs, linear_for=functools.partial(plain_linear, adapter, scales)))
        return losses_B.mean(), losses_B

    (_, losses_B), grads = mx.value_and_grad(run)(adapter)
    return losses_B, grads


def plain_linear(adapter: Arrays, scales: Mapping[str, float], block: str) -> Callable[..., Any]:
    """Return the adapted Linears of a block: (name, weight, x, widths) -> x W^T + scale (x A^T) B^T.

    The float32 arrays of the adapter are cast to x's dtype. With `widths` the result is split along its last axis.
    """

    def linear(name: str, weight: Any, x: mx.array, widths: Sequence[int] = ()) -> Any:
        full = f"{block}.{name}"
        y = x @ unpacked(weight).T
        if full in scales:
            A, B = (adapter[full + end].astype(x.dtype) for end in (lora.A, lora.B))
            y = y + scales[full] * ((x @ A.T) @ B.T)
        return mx.split(y, list(accumulate(widths))[:-1], axis=-1) if widths else y

    return linear
