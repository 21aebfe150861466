"""One training step of a family's true shape on random weights: what the benchmark times and the memory profile weighs.

A step is what training does: noise in, losses and gradients, clip, the optimizer, one wait at the end. B = 1.

L image tokens, T text rows, C latent channels, J text features.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models.families import Family
from stages.models.flux2 import Flux2, Flux2Config, image_ids, packs_outside, text_ids
from stages.tuner import lora, loss, optimizer, quantize
from stages.tuner.backprop import Plan, compiles, loss_and_grads
from stages.tuner.memory import Footprint, Meter, footprint

LR = 1e-4
OUTSIDE_BITS = 8  # least bits of a packed Linear outside the blocks


def bits_of(name: str, bits: int) -> int:
    """Bits of a tensor of a base packed to `bits`."""
    if "transformer_blocks." in name:
        return bits
    return max(bits, OUTSIDE_BITS) if packs_outside(name) else 16


def drawn(config: Flux2Config, bits: int, dtype: Any) -> dict[str, Any]:
    """Random weights, each packed before the next is drawn."""
    packers = {n: quantize.packer(n, lambda name: True) for n in (16, *quantize.BITS)}
    weights = {}
    for number, (name, shape) in enumerate(config.shapes().items()):
        value = mx.random.normal(shape, dtype, key=mx.random.key(number)) * shape[-1] ** -0.5
        weights[name] = packers[bits_of(name, bits)](name, value)
        mx.eval(weights[name])
    return weights


class Rig:
    """A model, an adapter, an optimizer, and what one step does to them."""

    def __init__(self, family: Family, bits: int, rank: int, method: str, size: tuple[int, int], config: Any = None) -> None:
        """`size`: width and height, pixels. `config`: sizes that are not the family's own."""
        self.config = config or Flux2Config.from_dict(family.transformer)
        self.size, self.text_rows = size, family.text_tokens
        self.dtype: Any = mx.bfloat16 if compiles() else mx.float32  # a CPU is slow in bfloat16
        self.model = Flux2(self.config, drawn(self.config, bits, self.dtype))
        targets = lora.choose(self.model.linears(), ["*"], rank)
        self.adapters, self.scales = lora.init(targets, 0), lora.scales(targets)
        self.stepper = optimizer.Stepper(optimizer.make(method), 1.0)
        self.state = self.stepper.init(self.adapters)
        self.limit: int | None = None
        mx.eval(self.adapters, self.state)

    @property
    def image_tokens(self) -> int:
        """L."""
        return self.size[0] // 16 * (self.size[1] // 16)

    def inputs(self, x_BLC: mx.array) -> dict[str, Any]:
        """What the model is given, at sigma one half."""
        T = self.text_rows
        return {
            "x_BLC": x_BLC,
            "x_ids_L4": image_ids(self.size[1] // 16, self.size[0] // 16),
            "ctx_BTJ": mx.random.normal((1, T, self.config.joint_attention_dim), self.dtype),
            "ctx_ids_T4": text_ids(T),
            "timesteps_B": mx.array([0.5]),
            "guidance_B": mx.array([1.0]) if self.config.guidance_embeds else None,
        }

    def footprint(self) -> Footprint:
        """What a step will take, tried on one block of each kind."""
        C = self.config.in_channels
        return footprint(self.model, self.adapters, self.scales, self.inputs(mx.random.normal((1, self.image_tokens, C))))

    def step(self, plan: Plan, meter: Meter | None = None) -> float:
        """One step; returns its loss. With a meter each phase is waited for, which a step without one is not.

        Nothing keeps the gradients or the old adapter while the new one is computed: they are let go one by one.
        """
        with _phase(meter, "batch"):
            noise_BLC, x0_BLC = mx.random.normal((2, 1, self.image_tokens, self.config.in_channels))
            inputs = self.inputs((noise_BLC + x0_BLC) / 2)
            asked = functools.partial(loss.mse, target_BLC=noise_BLC - x0_BLC)
            if meter:
                mx.eval(inputs["x_BLC"], inputs["ctx_BTJ"], asked.keywords)
        with _phase(meter, "gradients"):
            losses_B, grads = loss_and_grads(self.model, self.adapters, self.scales, inputs, asked, plan, self.limit)
            if meter:
                mx.eval(losses_B, grads)
        with _phase(meter, "optimizer"):
            sound = mx.all(mx.isfinite(losses_B))
            self.adapters, self.state, norm, done = self.stepper(self.adapters, grads, self.state, LR, sound)
            del grads, inputs
            mx.eval(self.adapters, self.state, losses_B, norm, done)
        if not done.item():
            raise ValueError(f"the gradient of {self.size[0]} x {self.size[1]} px is not finite")
        return float(np.array(losses_B)[0])


def _phase(meter: Meter | None, name: str) -> AbstractContextManager[None]:
    return meter.phase(name) if meter else nullcontext()
