"""DoRA, LoKr and rsLoRA against PEFT, under every plan of the trainer, merged, and started from other adapters."""

import functools
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
import torch
from peft import LoKrConfig, LoraConfig, inject_adapter_in_model

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.models.flux2.inputs import image_ids, text_ids
from stages.models.flux2.transformer import Flux2
from stages.tuner import quantize
from stages.tuner.adapters import dora, lokr, lora
from stages.tuner.adapters.initial import check_initial, fresh_adapter, start_from_adapter, target_weights
from stages.tuner.adapters.merge import check_shapes
from stages.tuner.adapters.product import product
from stages.tuner.adapters.targets import Target, select_targets, target_scales
from stages.tuner.blockwise import backprop
from stages.tuner.blockwise.backprop import loss_and_grads
from tests.stages.tuner.adapters.merging import merged_weights
from tests.stages.tuner.blockwise import test_backprop
from tests.stages.tuner.blockwise.test_backprop import assert_same

CONFIG = replace(test_backprop.CONFIG, num_layers=1, num_single_layers=2)
OUT, IN = 48, 32
VARIANTS = {
    "lora": {},
    "dora": {"variant": "dora"},
    "lokr": {"variant": "lokr", "factor": 4},
    "whole lokr": {"variant": "lokr", "factor": 4, "rank": 64},
    "rslora": {"rslora": True},
}
PEFT_NAMES = {
    lora.A: "lora_A.default.weight",
    lora.B: "lora_B.default.weight",
    dora.MAGNITUDE: "lora_magnitude_vector.default.weight",
    lokr.W1: "lokr_w1.default",
    lokr.W2: "lokr_w2.default",
    lokr.W2_A: "lokr_w2_a.default",
    lokr.W2_B: "lokr_w2_b.default",
}


def normal(seed: int, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def targets_of(linears: dict[str, tuple[int, int]], variant: str, rank: int = 4) -> list[Target]:
    return select_targets(linears, ["*"], **{"rank": rank, "alpha": 6.0, **VARIANTS[variant]})


def trained(targets: list[Target], bases: dict) -> dict[str, mx.array]:
    """Arrays as they are after some steps: nothing zero, magnitudes a little off their start."""
    made = fresh_adapter(targets, 3, bases)
    for i, (name, value) in enumerate(made.items()):
        if name.endswith(lora.ZERO_AT_START):
            made[name] = 0.3 * normal(i, *value.shape)
        elif name.endswith(dora.MAGNITUDE):
            made[name] = value * (1 + 0.1 * normal(i, *value.shape))
    return made


def tiny(dtype: mx.Dtype = mx.float32) -> Flux2:
    rng = np.random.default_rng(1)
    draw = {name: rng.normal(size=shape) / shape[-1] ** 0.5 for name, shape in CONFIG.shapes().items()}
    return Flux2(CONFIG, {name: mx.array(value, dtype) for name, value in draw.items()})


def adapted(model: Flux2, variant: str):
    targets = targets_of(model.linears(), variant)
    return trained(targets, target_weights(model.blocks, targets)), target_scales(targets)


def batch() -> dict:
    return {
        "x_BLC": normal(1, 2, 12, 8),
        "x_ids_L4": image_ids(3, 4),
        "ctx_BTJ": normal(2, 2, 5, 24),
        "ctx_ids_T4": text_ids(5),
        "timesteps_B": mx.array([0.3, 0.8]),
    }


def squared(prediction: mx.array, target: mx.array) -> mx.array:
    return mx.square(prediction.astype(mx.float32) - target).mean(axis=(1, 2))


LOSS = functools.partial(squared, target=normal(9, 2, 12, 8))


def linear_for(adapters, scales):
    def of(block):
        inside = {n.removeprefix(f"{block}."): a for n, a in adapters.items() if n.startswith(f"{block}.")}
        return lora.adapted_linear(inside, {n.removeprefix(f"{block}."): s for n, s in scales.items()})

    return of


def close(found: mx.array, wanted: mx.array, bound: float) -> bool:
    return mx.linalg.norm(found - wanted).item() <= bound * mx.linalg.norm(wanted).item()


def in_peft(variant: str, weight: mx.array, arrays: dict[str, mx.array], target: Target) -> torch.nn.Module:
    """A torch Linear with PEFT's own adapter of the same numbers."""
    model = torch.nn.ModuleDict({"q": torch.nn.Linear(IN, OUT, bias=False)})
    if variant.endswith("lokr"):
        alpha = 6 if variant == "lokr" else target.rank  # a whole w2 has no rank to divide by
        config = LoKrConfig(r=target.rank, alpha=alpha, target_modules=["q"], decompose_factor=target.factor)
    else:
        config = LoraConfig(r=4, lora_alpha=6, target_modules=["q"], use_dora=variant == "dora", use_rslora=variant == "rslora")
    with torch.no_grad():
        model["q"].weight.copy_(torch.tensor(np.array(weight)))
    inject_adapter_in_model(config, model)
    there = dict(model["q"].named_parameters())
    with torch.no_grad():
        for ending, value in arrays.items():
            there[PEFT_NAMES[ending]].copy_(torch.tensor(np.array(value)))
    return model["q"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_output_and_gradients_are_pefts(variant):
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
def test_a_fresh_adapter_leaves_every_bit_of_the_base(variant, dtype, bits):
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
def test_float32_masters_do_not_widen_a_bfloat16_stream_nor_its_gradient(variant):
    target = targets_of({"q": (OUT, IN)}, variant)
    weight, x = normal(5, OUT, IN).astype(mx.bfloat16), normal(6, 3, IN).astype(mx.bfloat16)
    arrays = trained(target, {"q": weight})
    names = list(arrays)

    def run(x, *values):
        return lora.adapted_linear(dict(zip(names, values, strict=True)), target_scales(target))("q", weight, x)

    (y,), (dx, *grads) = mx.vjp(run, [x, *arrays.values()], [mx.ones((3, OUT), mx.bfloat16)])
    assert y.dtype == dx.dtype == mx.bfloat16
    assert {g.dtype for g in grads} == {mx.float32}


def test_a_magnitude_is_not_rounded_to_the_half_precision_of_the_stream():
    weight, x = mx.eye(8, dtype=mx.bfloat16), mx.full((4096, 8), 1.5, mx.bfloat16)
    target = select_targets({"q": (8, 8)}, ["*"], 2, variant="dora")
    arrays = fresh_adapter(target, 0, {"q": weight})

    def run(magnitude):
        return lora.adapted_linear({**arrays, "q.lora_magnitude_vector": magnitude}, {"q": 1.0})("q", weight, x)

    (y,), (grad,) = mx.vjp(run, [arrays["q.lora_magnitude_vector"] * (1 + 3 / 256)], [mx.ones((4096, 8), mx.bfloat16)])
    assert y[0, 0].item() == 1.515625  # 1.5 (1 + 3/256), rounded once; with 1 + 3/256 rounded first it were 1.5234375
    assert mx.array_equal(grad, mx.full((8,), 4096 * 1.5))  # a sum that half precision cannot reach by adding


def test_the_lengths_of_rows_are_the_same_in_chunks_of_any_size(monkeypatch):
    weight, down, up = normal(1, 24, 64), normal(2, 4, 64), normal(3, 24, 4)
    for base in (weight, quantize.pack(weight, 8)):
        whole = dora.row_norms(base, down, up, 0.5)
        assert mx.allclose(whole, mx.linalg.norm(quantize.dense(base) + 0.5 * up @ down, axis=1), rtol=1e-6)
        with monkeypatch.context() as patch:
            patch.setattr(dora, "CHUNK", 64 * 7)
            assert mx.allclose(dora.row_norms(base, down, up, 0.5), whole, rtol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bits", [16, 8])
def test_the_merged_model_is_the_adapted_model(variant, bits):
    model = tiny()
    if bits < 16:
        for block in model.blocks:
            block.weights.update({name: quantize.pack_if_possible(weight, bits) for name, weight in block.weights.items()})
    adapters, scales = adapted(model, variant)
    want = model(**batch(), linear_for=linear_for(adapters, scales))
    base = model(**batch(), linear_for=linear_for({}, {}))
    weights = {f"{block.name}.{name}": weight for block in model.blocks for name, weight in block.weights.items()}
    new = merged_weights(weights, adapters, scales)
    for block in model.blocks:
        block.weights.update({n.removeprefix(f"{block.name}."): w for n, w in new.items() if n.startswith(f"{block.name}.")})
    found = model(**batch(), linear_for=linear_for({}, {}))
    assert mx.linalg.norm(want - base) > 0.1 * mx.linalg.norm(base)
    assert mx.abs(found - want).max().item() < 2e-5


def test_a_merge_into_another_model_is_refused_with_both_shapes():
    target = targets_of({"q": (OUT, IN)}, "lokr")
    arrays = trained(target, {})
    with pytest.raises(ValueError, match=r"q must have the shape \(8, 64\), got \(48, 32\)"):
        check_shapes({"q.weight": (8, 64)}, arrays, target_scales(target))
    with pytest.raises(ValueError, match="the adapter has q, which the model lacks"):
        check_shapes({"k.weight": (OUT, IN)}, arrays, target_scales(target))


def test_a_dimension_is_factored_as_pefts_lokr_factors_it():
    from peft.tuners.lokr.layer import factorization

    for dimension in (7, 12, 24, 127, 128, 3072, 9216, 27648):
        for factor in (2, 3, 4, 8, 10, 16):
            if factor * factor <= dimension:
                assert lokr.factorize(dimension, factor) == factorization(dimension, factor)
        assert lokr.factorize(dimension, None) == factorization(dimension, -1)


@pytest.mark.parametrize("rank", [1, 5, 6, 7, 12, 40])
def test_a_lokr_has_the_arrays_that_pefts_has_at_that_rank(rank):
    target = select_targets({"q": (OUT, IN)}, ["*"], rank, variant="lokr", factor=4)[0]
    module = in_peft("lokr", normal(5, OUT, IN), {}, target)
    wanted = {name: tuple(value.shape) for name, value in module.named_parameters() if "lokr" in name}
    assert {PEFT_NAMES[ending]: shape for ending, shape in target.shapes.items()} == wanted


def test_a_whole_second_factor_has_no_rank_and_so_no_scale():
    low, whole = (targets_of({"q": (OUT, IN)}, name)[0] for name in ("lokr", "whole lokr"))
    assert lokr.W2_A in targets_of({"q": (96, 64)}, "lokr")[0].shapes
    assert lokr.W2 in whole.shapes and whole.scale == 1
    assert targets_of({"q": (96, 64)}, "lokr")[0].scale == 1.5
    assert lokr.W1 in low.shapes


# Starting from another adapter.


def outputs(arrays, scales, weight, x):
    return lora.adapted_linear(arrays, scales)("q", weight, x)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_adapter_starts_as_the_initial_one_whatever_its_own_scale_and_rank(variant):
    weight, x = normal(5, 96, 64), normal(6, 3, 64)
    old = targets_of({"q": (96, 64)}, variant, rank=2)
    found = trained(old, {"q": weight})
    settings = {"rank": 5, "alpha": 2.5, **VARIANTS[variant]}
    new = select_targets({"q": (96, 64), "k": (96, 64)}, ["*"], **settings)
    fresh = fresh_adapter(new, 9, {"q": weight, "k": weight})
    made = start_from_adapter(found, target_scales(old), new, fresh, {"q": weight})
    assert {name: a.shape for name, a in made.items()} == {name: a.shape for name, a in fresh.items()}
    assert all(mx.array_equal(made[name], fresh[name]) for name in made if name.startswith("k."))
    want = outputs(found, target_scales(old), weight, x)
    assert close(outputs(made, target_scales(new), weight, x), want, 1e-6)
    if lora.A in new[0].shapes:
        assert mx.abs(made["q" + lora.A]).min(axis=1).max().item() > 0  # every direction can learn


def test_a_lora_may_begin_a_dora():
    weight, x = normal(5, OUT, IN), normal(6, 3, IN)
    old, new = (targets_of({"q": (OUT, IN)}, name) for name in ("lora", "dora"))
    found = trained(old, {})
    made = start_from_adapter(found, target_scales(old), new, fresh_adapter(new, 9, {"q": weight}), {"q": weight})
    assert dora.MAGNITUDE in lora.arrays_of_linear(made, "q")
    assert close(outputs(made, target_scales(new), weight, x), outputs(found, target_scales(old), weight, x), 1e-6)


def test_an_initial_adapter_that_does_not_fit_is_refused_in_one_line():
    weight = normal(5, OUT, IN)
    targets = {name: targets_of({"blocks.0.q": (OUT, IN)}, name) for name in VARIANTS}
    sizes = {
        "large": select_targets({"blocks.0.q": (OUT, IN)}, ["*"], 7),
        "other": select_targets({"blocks.0.q": (OUT, 8)}, ["*"], 4),
    }
    away = select_targets({"blocks.0.qs": (OUT, IN)}, ["*"], 4)
    wide = select_targets({"blocks.0.q": (OUT, IN)}, ["*"], 64, variant="lokr", factor=2)
    cases = [
        (sizes["large"], targets["lora"], "must have a rank <= 4, got 7: raise the rank to 7"),
        (sizes["other"], targets["lora"], r"must be for shape \(48, 32\), got \(48, 8\)"),
        (away, targets["lora"], "blocks.0.qs, which is not a target: add it to the targets; nearest: blocks.0.q"),
        (targets["dora"], targets["lora"], "must be a LoRA, got a DoRA"),
        (targets["lokr"], targets["dora"], "must be a DoRA, got a LoKr"),
        (wide, targets["whole lokr"], "set the factor"),
    ]
    for old, new, message in cases:
        base = dict.fromkeys(("blocks.0.q", "blocks.0.qs"), weight)
        with pytest.raises(ValueError, match=message) as caught:
            start_from_adapter(fresh_adapter(old, 0, base), target_scales(old), new, fresh_adapter(new, 0, base), base)
        assert "\n" not in str(caught.value)


def test_an_initial_adapter_with_values_that_are_not_finite_is_refused_by_the_name_of_the_array():
    targets = targets_of({"q": (OUT, IN)}, "lora")
    found = fresh_adapter(targets, 0)
    found["q" + lora.B] = mx.full(found["q" + lora.B].shape, float("nan"))
    with pytest.raises(ValueError, match=r"q.lora_B.weight has values that are not finite: choose an earlier checkpoint"):
        check_initial(found, target_scales(targets), targets)
