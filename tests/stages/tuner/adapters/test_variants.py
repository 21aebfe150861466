"""LoRA, rsLoRA, DoRA and LoKr against PEFT, and under every plan of the trainer."""

import functools

import mlx.core as mx
import numpy as np
import pytest
import torch

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner import quantize
from stages.tuner.adapters import lora
from stages.tuner.adapters.initial import fresh_adapter, target_weights
from stages.tuner.adapters.product import product
from stages.tuner.adapters.targets import select_targets, target_scales
from stages.tuner.blockwise import backprop
from stages.tuner.blockwise.backprop import loss_and_grads
from tests.stages.tuner.adapters.models import LOSS, adapted, batch, linear_for, tiny
from tests.stages.tuner.adapters.variants import IN, OUT, PEFT_NAMES, VARIANTS, in_peft, normal, targets_of, trained
from tests.stages.tuner.blockwise.test_backprop import assert_same


@pytest.mark.parametrize("variant", VARIANTS)
def test_output_and_gradients_equal_pefts(variant):
    target = targets_of({"q": (OUT, IN)}, variant)[0]
    weight, x, dy = normal(5, OUT, IN), normal(6, 3, IN), normal(7, 3, OUT)
    arrays = trained([target], {"q": weight})
    names = list(arrays)

    def run(x, *values):
        return lora.adapted_linear(dict(zip(names, values, strict=True)), {"q": target.scale})("q", weight, x)

    (y,), (dx, *grads) = mx.vjp(run, [x, *arrays.values()], [dy])
    module = in_peft(variant, weight, lora.arrays_of_linear(arrays, "q"), target)
    there = torch.tensor(np.array(x), requires_grad=True)
    out = module(there)
    out.backward(torch.tensor(np.array(dy)))
    np.testing.assert_allclose(np.array(y), out.detach().numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.array(dx), there.grad.numpy(), rtol=1e-5, atol=1e-5)
    parameters = dict(module.named_parameters())
    for name, grad in zip(names, grads, strict=True):
        wanted = parameters[PEFT_NAMES[name.removeprefix("q")]].grad.numpy()
        assert np.abs(wanted).max() > 0.1
        np.testing.assert_allclose(np.array(grad), wanted, rtol=1e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bits", [16, 4])
def test_a_fresh_adapter_changes_no_bit_of_the_output(variant, dtype, bits):
    target = targets_of({"q": (24, 128)}, variant)
    weight, x = normal(5, 24, 128).astype(dtype), normal(6, 3, 128).astype(dtype)
    base = weight if bits == 16 else quantize.pack(weight, bits)
    fresh = fresh_adapter(target, 0, {"q": base})
    y = lora.adapted_linear(fresh, target_scales(target))("q", base, x)
    assert y.dtype == dtype
    assert mx.array_equal(y, product(x, base))
    assert lora.largest_change(fresh).item() == 0
    assert {a.dtype for a in fresh.values()} == {mx.float32}
    assert {name.removeprefix("q"): a.shape for name, a in fresh.items()} == target[0].shapes


@pytest.mark.parametrize("plan", ["whole", "blocks", 2])
@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("variant", ["dora", "lokr", "whole lokr"])
def test_every_plan_gives_the_gradients_of_the_whole_graph(variant, bits, plan):
    model, dense = tiny(), tiny()
    if bits < 16:
        for block, other in zip(model.blocks, dense.blocks, strict=True):
            block.weights.update({name: quantize.pack_if_possible(weight, bits) for name, weight in block.weights.items()})
            other.weights.update({name: quantize.dense(weight) for name, weight in block.weights.items()})
    adapters, scales = adapted(model, variant)
    losses_B, grads = loss_and_grads(model, adapters, scales, batch(), LOSS, plan)

    def plainly(adapters):
        losses_B = LOSS(dense(**batch(), linear_for=linear_for(adapters, scales)))
        return losses_B.mean(), losses_B

    (_, true_B), true = mx.value_and_grad(plainly)(adapters)
    assert mx.allclose(losses_B, true_B, rtol=1e-6)
    assert set(true) == set(adapters)
    assert_same(grads, true)
    assert {grad.dtype for grad in grads.values()} == {mx.float32}


@pytest.mark.parametrize("variant", ["dora", "lokr", "whole lokr"])
def test_a_compiled_block_gives_the_same_gradients(variant, monkeypatch):
    class Toy:
        def __init__(self):
            block = {"kind": "toy", "weights": {"fc.weight": normal(4, 8, 8)}}
            self.blocks = [type("Block", (), {"name": f"toys.{i}", **block})() for i in range(2)]

        def enter(self, x):
            return x, ()

        @staticmethod
        def block(kind):
            return lambda weights, h, shared, linear: h + linear("fc", weights["fc.weight"], h)

        def leave(self, h, shared):
            return h

    found = []
    for compiled in (False, True):
        monkeypatch.setattr(backprop, "compiles", lambda compiled=compiled: compiled)
        model = Toy()
        targets = select_targets(
            {f"toys.{i}.fc": (8, 8) for i in range(2)},
            ["*"],
            64 if "whole" in variant else 1,
            variant=variant.removeprefix("whole "),
            factor=2,
        )
        adapters = trained(targets, target_weights(model.blocks, targets))
        for step in range(2):
            moved = {name: value + 0.1 * step for name, value in adapters.items()}
            loss = functools.partial(lambda y, target: mx.square(y - target).mean(-1), target=normal(step, 3, 8))
            found.append(loss_and_grads(model, moved, target_scales(targets), {"x": normal(step, 3, 8)}, loss, "blocks")[1])
    for plain, fast in zip(found[:2], found[2:], strict=True):
        assert_same(fast, plain)


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_adapters_keep_bfloat16_activations_and_their_gradients_in_bfloat16(variant):
    target = targets_of({"q": (OUT, IN)}, variant)
    weight, x = normal(5, OUT, IN).astype(mx.bfloat16), normal(6, 3, IN).astype(mx.bfloat16)
    arrays = trained(target, {"q": weight})
    names = list(arrays)

    def run(x, *values):
        return lora.adapted_linear(dict(zip(names, values, strict=True)), target_scales(target))("q", weight, x)

    (y,), (dx, *grads) = mx.vjp(run, [x, *arrays.values()], [mx.ones((3, OUT), mx.bfloat16)])
    assert y.dtype == dx.dtype == mx.bfloat16
    assert {g.dtype for g in grads} == {mx.float32}
