from __future__ import annotations

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner.adapters.lora import product
from stages.tuner.weights import QuantizedWeight, pack, pack_if_possible


def drawn(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape)))


@pytest.mark.parametrize(("bits", "bound"), [(8, 0.01), (4, 0.12)])
def test_an_unpacked_weight_is_near_the_original(bits, bound):
    weight = drawn(96, 128)
    packed = pack(weight, bits)
    assert packed.bits == bits
    assert packed.dense().shape == weight.shape
    assert mx.linalg.norm(packed.dense() - weight).item() < bound * mx.linalg.norm(weight).item()


def test_packing_takes_memory_for_one_weight_at_a_time_and_skips_what_cannot_be_packed():
    weights = {f"{i}.weight": drawn(256, 256) + i for i in range(8)} | {"norm.weight": drawn(64), "narrow.weight": drawn(4, 24)}
    names, size = list(weights), sum(weight.nbytes for weight in weights.values())
    mx.eval(weights)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for name in names:
        weights[name] = pack_if_possible(weights.pop(name), 16 if name == "7.weight" else 4)
    assert list(weights) == names
    assert {n for n, w in weights.items() if not isinstance(w, QuantizedWeight)} == {"7.weight", "norm.weight", "narrow.weight"}
    assert mx.get_peak_memory() - before < 2 * 256 * 256 * 4
    smaller = sum(array.nbytes for _, array in tree_flatten(weights)) - size
    assert mx.get_active_memory() - before < smaller + 64 * 1024  # less padding of buffers


def test_a_large_weight_is_never_unpacked_as_a_whole(monkeypatch):
    x, weight = drawn(4, 1024), pack(drawn(4096, 1024), 4)
    mx.eval(x)
    monkeypatch.setattr("stages.tuner.weights.UNPACKED_CHUNK", 1 << 20)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(mx.grad(lambda x: product(x, weight).sum())(x))
    assert mx.get_peak_memory() - before < 8 << 20 < 4096 * 1024 * 4
