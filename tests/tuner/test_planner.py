"""The estimate of a step's memory beside what MLX measures."""

from __future__ import annotations

import functools

import mlx.core as mx
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.models.families import family
from stages.models.flux2 import Flux2, Flux2Config, image_ids, text_ids
from stages.tuner import lora, loss, optimizer, planner, quantize
from stages.tuner.backprop import loss_and_grads

SIZES = {"num_layers": 2, "num_single_layers": 3, "joint_attention_dim": 64, "timestep_guidance_channels": 32}
TEXT = 32


def config(heads: int, width: int) -> Flux2Config:
    rope = {"attention_head_dim": width, "axes_dims_rope": (width // 4,) * 4}
    return Flux2Config.from_dict({**family("tiny").transformer, **SIZES, "num_attention_heads": heads, **rope})


def inputs(c: Flux2Config, side: int) -> dict:
    return {
        "x_BLC": mx.zeros((1, side * side, c.in_channels)),
        "x_ids_L4": image_ids(side, side),
        "ctx_BTJ": mx.zeros((1, TEXT, c.joint_attention_dim)),
        "ctx_ids_T4": text_ids(TEXT),
        "timesteps_B": mx.array([0.5]),
    }


def nbytes(arrays: dict) -> int:
    return sum(value.nbytes for value in arrays.values())


@pytest.mark.parametrize("plan", ["blocks", 3, "whole"])
@pytest.mark.parametrize(("heads", "width", "side", "bits"), [(2, 64, 12, 16), (4, 32, 20, 16), (4, 64, 12, 4), (4, 64, 4, 8)])
def test_the_estimate_is_within_its_stated_factor_of_the_measured_peak(heads, width, side, bits, plan):
    c = config(heads, width)
    each = quantize.packer(bits, lambda name: "transformer_blocks." in name)
    arrays = {name: each(name, mx.random.normal(shape) * shape[-1] ** -0.5) for name, shape in c.shapes().items()}
    shapes = [(shape, bits if "transformer_blocks." in name else 16) for name, shape in c.shapes().items()]
    assert planner.weight_bytes(shapes, 4) == quantize.nbytes(arrays)
    model = Flux2(c, arrays)
    targets = lora.choose(model.linears(), ["*"], 4 if side > 4 else 32)
    adapter = lora.init(targets, 0)
    stepper = optimizer.Stepper(optimizer.AdamW(), 1.0)
    state = stepper.init(adapter)
    given, target = inputs(c, side), mx.zeros((1, side * side, c.in_channels))
    mx.eval(adapter, state, given["x_BLC"], given["ctx_BTJ"], target, list(arrays.values()))
    del arrays
    scores = heads * (side * side + TEXT) ** 2 * 4
    ghost = Flux2(c, {name: mx.zeros(shape) for name, shape in c.shapes().items()})
    held = {"weights": planner.weight_bytes(shapes, 4), "adapter": nbytes(adapter), "state": nbytes(state)}
    found = planner.estimate(ghost, given, **held, scores=scores, kept_scores=scores)

    before = mx.get_active_memory() - sum(held.values())  # of other tests
    mx.reset_peak_memory()
    asked = functools.partial(loss.mse, target_BLC=target)
    losses, grads = loss_and_grads(model, adapter, lora.scales(targets), given, asked, plan, memory_limit=1)
    mx.eval(losses, grads)
    mx.eval(stepper(adapter, grads, state, 1e-4, mx.array(True)))
    measured = mx.get_peak_memory() - before
    assert 1 / planner.FACTOR < found.need(plan) / measured < planner.FACTOR


def test_an_estimate_computes_nothing():
    c = config(8, 64)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    ghost = Flux2(c, {name: mx.zeros(shape) for name, shape in c.shapes().items()})
    assert planner.estimate(ghost, inputs(c, 64), 0, 0, 0).need("whole") > 100e6
    assert mx.get_peak_memory() - before < 5e6


def test_more_kept_blocks_never_need_less():
    found = planner.Estimate(100, 10, 20, 5, (50, 50, 40, 40), scores=7, kept_scores=7)
    needs = [found.need(plan) for plan in ("blocks", 1, 2, 3, "whole")]
    assert needs[0] == needs[1]
    assert needs == sorted(needs)
