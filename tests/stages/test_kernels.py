"""No product on Metal exceeds the limit of one kernel, and a split product is the product."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from stages import kernels
from stages.tuner.adapters.product import product
from stages.tuner.quantize import dense, pack, row_chunks


def drawn(*shape: int) -> mx.array:
    return mx.array(np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32))


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "limited", lambda: True)


def test_without_metal_a_product_is_one_kernel():
    assert kernels.most_outputs(10**9, 10**9) is None
    assert row_chunks(mx.zeros((27648, 3072)), 4608 * 4) == [slice(None)]


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
    assert mx.allclose(kernels.linear(x, dense(packed)), x @ dense(packed).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hidden", [3072, 4096, 6144], ids=["klein 4B", "klein 9B", "dev"])
@pytest.mark.parametrize("samples", [1, 4, 16])
@pytest.mark.parametrize("side", [512, 768, 1024, 2048])
def test_no_product_of_a_family_at_any_size_and_micro_batch_exceeds_the_limit(hidden, samples, side, metal):
    tokens = samples * ((side // 16) ** 2 + 512)
    for outputs, inputs in ((9 * hidden, hidden), (6 * hidden, hidden), (hidden, 4 * hidden), (hidden, 15360)):
        for rows in row_chunks(mx.zeros((outputs, inputs)), tokens):
            width = outputs if rows == slice(None) else rows.stop - rows.start
            assert kernels.product_flop(tokens, inputs, width) <= kernels.LIMIT
