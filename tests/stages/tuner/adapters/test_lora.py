"""LoRA, rsLoRA, DoRA and LoKr against PEFT, and under every plan of the trainer."""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner.adapters import lora
from stages.tuner.adapters.lora import check_fits, merge, product
from stages.tuner.adapters.targets import fresh_adapter, select_targets, start_from_adapter, target_scales, target_weights
from stages.tuner.blockwise import backprop
from stages.tuner.blockwise.backprop import loss_and_grads, model_forward
from stages.tuner.weights import pack, pack_if_possible, unpacked
from tests.stages.tuner.adapters.variants import (
    CONFIG,
    IN,
    OUT,
    PEFT_NAMES,
    VARIANTS,
    adapted,
    in_peft,
    normal,
    targets_of,
    tiny,
    trained,
)
from tests.stages.tuner.blockwise.test_backprop import (
    Stream,
    assert_same,
    batch,
    loss_of,
    packed_and_dense,
    whole_graph_gradients,
)


def test_values_go_to_the_block_whose_whole_name_begins_their_key_in_the_order_of_the_keys():
    values = {"deep.blocks.10.q.B": 1, "deep.blocks.1.v.B": 2, "deep.blocks.1.q.B": 3, "deep.blocks.100.q.B": 4, "deep": 5}
    found, unknown = lora.split_by_block(["deep.blocks.1", "deep.blocks.2", "deep.blocks.10"], values)
    assert [list(own.items()) for own in found] == [[("v.B", 2), ("q.B", 3)], [], [("q.B", 1)]]
    assert unknown == ["deep.blocks.100.q.B", "deep"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_output_and_gradients_equal_pefts_and_the_merged_weight_gives_that_output(variant):
    import torch

    target = targets_of({"q": (OUT, IN)}, variant)[0]
    weight, x, dy = normal(5, OUT, IN), normal(6, 3, IN), normal(7, 3, OUT)
    arrays = trained([target], {"q": weight})
    names = list(arrays)

    def run(x, *values):
        return lora.AdaptedLinear(dict(zip(names, values, strict=True)), {"q": target.scale})("q", weight, x)

    (y,), (dx, *grads) = mx.vjp(run, [x, *arrays.values()], [dy])
    module = in_peft(variant, weight, lora.arrays_of_linear(arrays, "q"), target)
    there = torch.tensor(np.array(x), requires_grad=True)
    out = module(there)
    out.backward(torch.tensor(np.array(dy)))
    np.testing.assert_allclose(np.array(y), out.detach().numpy(), rtol=1e-5, atol=1e-5)
    merged = merge(weight, lora.arrays_of_linear(arrays, "q"), target.scale)
    np.testing.assert_allclose(np.array(x @ merged.T), np.array(y), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.array(dx), there.grad.numpy(), rtol=1e-5, atol=1e-5)
    parameters = dict(module.named_parameters())
    for name, grad in zip(names, grads, strict=True):
        wanted = parameters[PEFT_NAMES[name.removeprefix("q")]].grad.numpy()
        assert np.abs(wanted).max() > 0.1
        np.testing.assert_allclose(np.array(grad), wanted, rtol=1e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bits", [16, 4])
def test_a_fresh_adapter_changes_no_bit_of_the_output_and_has_float32_gradients_beside_activations_in_their_own(
    variant, dtype, bits
):
    target = targets_of({"q": (24, 128)}, variant)
    weight, x = normal(5, 24, 128).astype(dtype), normal(6, 3, 128).astype(dtype)
    base = weight if bits == 16 else pack(weight, bits)
    fresh = fresh_adapter(target, 0, {"q": base})
    names = list(fresh)

    def run(x, *values):
        return lora.AdaptedLinear(dict(zip(names, values, strict=True)), target_scales(target))("q", base, x)

    (y,), (dx, *grads) = mx.vjp(run, [x, *fresh.values()], [mx.ones((3, 24), dtype)])
    assert y.dtype == dx.dtype == dtype
    assert {g.dtype for g in grads} == {mx.float32}
    assert mx.array_equal(y, x @ unpacked(base).T) and mx.array_equal(dx, mx.ones((3, 24), dtype) @ unpacked(base))
    assert lora.largest_change(fresh).item() == 0
    assert {a.dtype for a in fresh.values()} == {mx.float32}
    assert {name.removeprefix("q"): a.shape for name, a in fresh.items()} == target[0].shapes


@pytest.mark.parametrize(("plan", "bits"), [("whole", 4), ("blocks", 16), (2, 4)])
@pytest.mark.parametrize("variant", ["lora", "dora", "lokr", "whole lokr"])
def test_every_plan_gives_the_gradients_of_the_whole_graph(variant, bits, plan):
    model, dense = packed_and_dense(bits, CONFIG)
    adapters, scales = adapted(model, variant)
    losses_B, grads = loss_and_grads(model, adapters, scales, batch(), loss_of(), plan)
    true_B, true = whole_graph_gradients(dense, adapters, scales, batch(), loss_of())
    assert mx.allclose(losses_B, true_B, rtol=1e-6)
    assert_same(grads, true)
    assert {grad.dtype for grad in grads.values()} == {mx.float32}


@pytest.mark.parametrize(
    ("variant", "plan"), [("lora", "whole"), ("lora", "blocks"), ("dora", "blocks"), ("lokr", "blocks"), ("whole lokr", "blocks")]
)
def test_a_compiled_block_takes_every_array_of_a_step_as_an_argument(variant, plan, monkeypatch):
    """A captured array would be frozen into the graph: the second step would compute with the first step's."""
    found = []
    for compiled in (False, True):
        monkeypatch.setattr(backprop, "compiles", lambda compiled=compiled: compiled)
        model = Stream(3, 3, 8)  # small: a C++ compiler takes its time
        rank, kind = 64 if "whole" in variant else 1, variant.removeprefix("whole ")
        targets = select_targets(model.linears(), ["*"], rank, variant=kind, factor=2)
        adapters = trained(targets, target_weights(model.blocks, targets))
        for step in range(2):
            moved = {name: value + 0.1 * step for name, value in adapters.items()}
            loss = functools.partial(lambda y, target: mx.square(y - target).mean(-1), target=normal(step, 3, 8))
            found.append(loss_and_grads(model, moved, target_scales(targets), {"x_BK": normal(step, 3, 8)}, loss, plan)[1])
    for plain, fast in zip(found[:2], found[2:], strict=True):
        assert_same(fast, plain)


def test_a_magnitude_is_not_rounded_to_half_precision():
    weight, x = mx.eye(8, dtype=mx.bfloat16), mx.full((4096, 8), 1.5, mx.bfloat16)
    target = select_targets({"q": (8, 8)}, ["*"], 2, variant="dora")
    arrays = fresh_adapter(target, 0, {"q": weight})

    def run(magnitude):
        return lora.AdaptedLinear({**arrays, "q.lora_magnitude_vector": magnitude}, {"q": 1.0})("q", weight, x)

    (y,), (grad,) = mx.vjp(run, [arrays["q.lora_magnitude_vector"] * (1 + 3 / 256)], [mx.ones((4096, 8), mx.bfloat16)])
    assert y[0, 0].item() == 1.515625  # 1.5 (1 + 3/256), rounded once; with 1 + 3/256 rounded first it were 1.5234375
    assert mx.array_equal(grad, mx.full((8,), 4096 * 1.5))  # a sum that half precision cannot reach by adding


def test_row_norms_are_equal_for_chunks_of_any_size(monkeypatch):
    weight, down, up = normal(1, 24, 64), normal(2, 4, 64), normal(3, 24, 4)
    for base in (weight, pack(weight, 8)):
        whole = lora.row_norms(base, down, up, 0.5)
        assert mx.allclose(whole, mx.linalg.norm(unpacked(base) + 0.5 * up @ down, axis=1), rtol=1e-6)
        with monkeypatch.context() as patch:
            patch.setattr(lora, "NORM_CHUNK", 64 * 7)
            assert mx.allclose(lora.row_norms(base, down, up, 0.5), whole, rtol=1e-6)


def test_a_dimension_is_factorized_as_in_pefts_lokr():
    from peft.tuners.lokr.layer import factorization

    for dimension in (7, 12, 24, 127, 128, 3072, 9216, 27648):
        for factor in (2, 3, 4, 8, 10, 16):
            if factor * factor <= dimension:
                assert lora.factorize(dimension, factor) == factorization(dimension, factor)
        assert lora.factorize(dimension, None) == factorization(dimension, -1)


@pytest.mark.parametrize("rank", [1, 5, 6, 7, 12, 40])
def test_a_lokr_has_the_array_shapes_of_pefts_at_every_rank(rank):
    target = select_targets({"q": (OUT, IN)}, ["*"], rank, variant="lokr", factor=4)[0]
    module = in_peft("lokr", normal(5, OUT, IN), {}, target)
    wanted = {name: tuple(value.shape) for name, value in module.named_parameters() if "lokr" in name}
    assert {PEFT_NAMES[ending]: shape for ending, shape in target.shapes.items()} == wanted


WHOLE = select_targets({"block.0.q": (6, 4), "block.0.o": (4, 6), "head.linear": (3, 4)}, ("*",), 2, 4.0, whole=("head.linear",))


def test_a_difference_starts_at_zero_and_is_added_to_the_weight():
    assert not mx.any(fresh_adapter(WHOLE, seed=0)["head.linear.diff"]).item()
    weight, diff, x = normal(1, 3, 4), normal(2, 3, 4), normal(3, 5, 4)
    y = lora.AdaptedLinear({"linear.diff": diff}, {"linear": 1.0})("linear", weight, x)
    assert mx.allclose(y, x @ (weight + diff).T, atol=1e-6).item()
    assert mx.allclose(merge(weight, {lora.DIFF: diff}, 1.0), weight + diff).item()
    assert lora.linear_shape({lora.DIFF: diff}) == (3, 4)


def test_training_goes_on_from_a_difference_but_not_from_a_lora_of_the_same_linear():
    fresh = fresh_adapter(WHOLE, seed=0)
    diff = mx.full((3, 4), 0.5)
    started = start_from_adapter({"head.linear.diff": diff}, {"head.linear": 1.0}, WHOLE, fresh)
    assert mx.array_equal(started["head.linear.diff"], diff).item()
    pair = {"head.linear" + lora.A: mx.zeros((2, 4)), "head.linear" + lora.B: mx.zeros((3, 2))}
    with pytest.raises(ValueError, match=r"the adapter of head.linear must be a whole difference, got a LoRA"):
        start_from_adapter(pair, {"head.linear": 1.0}, WHOLE, fresh)


WIDE_OUT, WIDE_IN, RANK = 96, 128, 4


def close(found, wanted):
    return all(mx.abs(a - b).max() < 1e-5 * mx.abs(b).max() for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("bits", "scale", "chunk"),
    [
        (16, 1.0, 1 << 28),
        (16, 0.5, 1 << 28),
        (4, 0.5, 1 << 28),
        (4, 0.5, 20 * WIDE_IN * 4),
    ],  # the last: unpacked 20 rows at a time
)
def test_outputs_and_all_gradients_equal_those_of_plain_operations(bits, scale, chunk, monkeypatch):
    monkeypatch.setattr("stages.tuner.weights.UNPACKED_CHUNK", chunk)
    weight = pack_if_possible(normal(1, WIDE_OUT, WIDE_IN), bits)
    x, down, up, dy = normal(2, 2, 5, WIDE_IN), normal(3, RANK, WIDE_IN), normal(4, WIDE_OUT, RANK), normal(5, 2, 5, WIDE_OUT)

    def plain(x, down, up):
        return x @ unpacked(weight).T + scale * ((x @ down.T) @ up.T)

    ys, grads = mx.vjp(lambda x, *pair: product(x, weight, pair, scale), [x, down, up], [dy])
    plain_ys, plain_grads = mx.vjp(plain, [x, down, up], [dy])
    assert close(ys, plain_ys)
    assert close(grads, plain_grads)
    assert close(mx.vjp(lambda x: product(x, weight), [x], [dy])[1], [dy @ unpacked(weight)])


def test_a_merge_into_another_model_is_refused_with_both_shapes():
    target = targets_of({"q": (OUT, IN)}, "lokr")
    arrays = trained(target, {})
    with pytest.raises(ValueError, match=r"q must have the shape \(8, 64\), got \(48, 32\)"):
        check_fits({"q": (8, 64)}, arrays, target_scales(target))
    with pytest.raises(ValueError, match="the adapter has q, which the model lacks"):
        check_fits({"k": (OUT, IN)}, arrays, target_scales(target))


def test_every_block_runs_under_the_limit_of_live_memory_and_the_limit_is_restored(monkeypatch):
    model, seen = tiny(), []
    real = backprop.dispatch
    monkeypatch.setattr(backprop, "dispatch", lambda *given: [seen.append(mx.get_memory_limit()), real(*given)][1])
    predict, before = model_forward(model, None), mx.get_memory_limit()
    predict.live_bytes = 123_456_789
    predict(**batch())
    assert seen == [123_456_789] * (len(model.blocks) + 2)
    assert mx.get_memory_limit() == before
