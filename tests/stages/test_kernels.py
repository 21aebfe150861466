"""No product on Metal exceeds the limit of one kernel, and a split product is the product."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from stages import kernels
from stages.models.t5 import model as t5
from stages.tuner.adapters import lora
from stages.tuner.adapters.lora import product
from stages.tuner.weights import pack, row_chunks, unpacked


def drawn(*shape: int) -> mx.array:
    return mx.array(np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32))


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "limited", lambda: True)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_product_in_several_kernels_has_the_same_result_and_gradients(bits, metal, monkeypatch):
    x, dy, weight = drawn(2, 5, 128), drawn(2, 5, 192), drawn(192, 128)
    pair = (drawn(4, 128), drawn(192, 4))
    packed = weight if bits == 16 else pack(weight, bits)

    def run(x: mx.array, *pair: mx.array) -> mx.array:
        return product(x, packed, pair, 0.5)

    whole = mx.vjp(run, [x, *pair], [dy])
    monkeypatch.setattr(kernels, "LIMIT", 2.0 * 10 * 128 * 64)
    assert len(row_chunks(packed, 10)) == 3
    split = mx.vjp(run, [x, *pair], [dy])
    for before, after in zip([*whole[0], *whole[1]], [*split[0], *split[1]], strict=True):
        assert mx.allclose(before, after, rtol=1e-5, atol=1e-4)
    assert mx.allclose(kernels.linear(x, unpacked(packed)), x @ unpacked(packed).T, rtol=1e-5, atol=1e-5)


def test_a_large_product_in_parts_has_the_result_of_one_with_and_without_a_term_to_add(metal, monkeypatch):
    x, right, add = drawn(2, 6, 128), drawn(128, 300), drawn(2, 6, 300)
    whole = kernels.product(x, right), kernels.product(x, right, add)
    monkeypatch.setattr(kernels, "LIMIT", 2.0 * 12 * 128 * 100)
    assert kernels.most_outputs(12, 128) == 100 and kernels.most_items(kernels.LIMIT / 3) == 3
    for before, after in zip(whole, (kernels.product(x, right), kernels.product(x, right, add)), strict=True):
        assert mx.allclose(before, after, rtol=1e-5, atol=1e-4)


def test_a_kronecker_adapter_and_attention_in_parts_have_the_results_and_gradients_of_whole_ones(metal, monkeypatch):
    arrays = {lora.W1: drawn(6, 4), lora.W2_A: drawn(8, 3), lora.W2_B: drawn(3, 16)}
    q, mask = drawn(4, 2, 8, 16), drawn(4, 1, 8, 8)

    def change(x: mx.array, w1: mx.array) -> mx.array:
        return lora.lokr_output(x, {**arrays, lora.W1: w1})

    def both() -> list[mx.array]:
        grown = mx.vjp(change, [drawn(5, 64), arrays[lora.W1]], [drawn(5, 48)])
        attended = mx.vjp(lambda q: t5.attend(q, q, q, mask), [q], [q])
        return [*grown[0], *grown[1], *attended[0], *attended[1]]

    monkeypatch.setattr(t5, "slow_exp", lambda x: False)
    whole = both()
    monkeypatch.setattr(kernels, "LIMIT", 4.0 * 2 * 8 * 16 * 8)
    assert kernels.most_items(2 * 2 * kernels.product_flop(8, 16, 8)) == 1
    for before, after in zip(whole, both(), strict=True):
        assert mx.allclose(before, after, rtol=1e-4, atol=1e-4)
