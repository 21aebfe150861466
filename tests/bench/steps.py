"""One training step of a family's true shape on random weights: what the benchmark times and the memory profile weighs.

A step is what training does: noise in, losses and gradients, clip, the optimizer, one wait at the end. Its plan is one of
training's, or "plain": the graph that anyone would write, to compare with.

B samples, L image tokens, T text rows, C latent channels, J text features.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models.family import Family
from stages.models.flux2.transformer import Flux2, Flux2Config, image_ids, text_ids
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.train.memory_plan import BatchShape
from stages.text_to_image.train.profile import random_transformer
from stages.tuner import quantize
from stages.tuner.adapters import lora
from stages.tuner.adapters.initial import fresh_adapter, target_weights
from stages.tuner.adapters.stacks import Stacks
from stages.tuner.adapters.targets import target_scales
from stages.tuner.blockwise.backprop import Arrays, Linear, Loss, Plan, loss_and_grads
from stages.tuner.blockwise.device import live_memory_limit
from stages.tuner.blockwise.meter import Meter
from stages.tuner.diffusion import loss
from stages.tuner.step import build_optimizer, cast_adapter, choose_targets


class Rig:
    """A model, an adapter, an optimizer, and what one step does to them."""

    def __init__(self, family: Family, c: TrainConfig, batch: BatchShape) -> None:
        self.config = Flux2Config.from_dict(family.transformer)
        self.c, self.batch = c, batch
        self.dtype: Any = getattr(mx, c.precision)
        self.model: Any = random_transformer(family, c)
        targets = choose_targets(self.model.linears(), c)
        bases = target_weights(self.model.blocks, targets) if c.variant == "dora" else None
        self.masters, self.scales = Stacks.of(fresh_adapter(targets, 0, bases)), target_scales(targets)
        self.optimizer_step = build_optimizer(c)
        self.state = self.optimizer_step.init(self.masters)
        self.bound: int | None = None  # bytes that may be live before the next block waits for the device
        mx.eval(self.masters.arrays, self.state)

    def inputs(self, x_BLC: mx.array) -> dict[str, Any]:
        """What the model is given, at sigma one half."""
        B, T = self.batch.samples, self.batch.text_rows
        return {
            "x_BLC": x_BLC,
            "x_ids_L4": image_ids(self.batch.height // 16, self.batch.width // 16),
            "ctx_BTJ": mx.random.normal((B, T, self.config.joint_attention_dim), self.dtype),
            "ctx_ids_T4": text_ids(T),
            "timesteps_B": mx.full((B,), 0.5),
            "guidance_B": mx.ones((B,)) if self.config.guidance_embeds else None,
        }

    def step(self, plan: Plan, meter: Meter | None = None) -> float:
        """One step; returns the mean loss. With a meter each phase is waited for, which a step without one is not."""
        with live_memory_limit(self.bound):
            return self._step(plan, meter)

    def _step(self, plan: Plan, meter: Meter | None) -> float:
        with _phase(meter, "batch"):
            noise_BLC, x0_BLC = mx.random.normal((2, self.batch.samples, math.prod(self.batch.grid), self.config.in_channels))
            inputs = self.inputs((noise_BLC + x0_BLC) / 2)
            asked = functools.partial(loss.mse, target_BLC=noise_BLC - x0_BLC)
            if meter:
                mx.eval(inputs["x_BLC"], inputs["ctx_BTJ"], asked.keywords)
        with _phase(meter, "gradients"):
            adapters = self.masters.unstack() if plan == "plain" else cast_adapter(self.masters, self.dtype, self.c)
            compute = plain if plan == "plain" else functools.partial(loss_and_grads, plan=plan)
            losses_B, grads = compute(self.model, adapters, self.scales, inputs, asked)
            if meter:
                mx.eval(losses_B, grads)
        with _phase(meter, "optimizer"):
            sound = mx.all(mx.isfinite(losses_B))
            del adapters, inputs
            self.masters, self.state, norm, done = self.optimizer_step(self.masters, grads, self.state, self.c.lr, sound)
            mx.eval(self.masters.arrays, self.state, losses_B, norm, done)
        if not done.item():
            raise ValueError(f"the gradient of {self.batch.width} x {self.batch.height} px is not finite")
        return float(np.array(losses_B).mean())


def plain(
    model: Flux2, adapters: Arrays, scales: dict[str, float], inputs: dict[str, Any], asked: Loss
) -> tuple[mx.array, Arrays]:
    """(losses_B, gradients) as anyone would write them: the whole model as one graph, nothing compiled. The plans' peer."""

    def run(adapters: Arrays) -> tuple[mx.array, mx.array]:
        losses_B = asked(model(**inputs, linear_for=functools.partial(plain_linear, adapters, scales)))
        return losses_B.mean(), losses_B

    (_, losses_B), grads = mx.value_and_grad(run)(adapters)
    return losses_B, grads


def plain_linear(adapters: Arrays, scales: dict[str, float], block: str) -> Linear:
    """x W^T + scale (x A^T) B^T in MLX's own operations; the masters are cast where they are used."""

    def linear(name: str, weight: Any, x: mx.array, widths: Sequence[int] = ()) -> Any:
        full = f"{block}.{name}"
        y = x @ quantize.dense(weight).T
        if full in scales:
            A, B = (adapters[full + end].astype(x.dtype) for end in (lora.A, lora.B))
            y = y + scales[full] * ((x @ A.T) @ B.T)
        return mx.split(y, list(accumulate(widths))[:-1], axis=-1) if widths else y

    return linear


def _phase(meter: Meter | None, name: str) -> AbstractContextManager[None]:
    return meter.phase(name) if meter else nullcontext()
