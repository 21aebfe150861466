import io
import re

import mlx.core as mx
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner import quantize
from stages.tuner.adapters.product import product

OUT, IN, RANK = 96, 128, 4


def drawn(*shape, seed=0):
    return mx.random.normal(shape, key=mx.random.key(seed + sum(shape)))


def close(found, wanted):
    return all(mx.abs(a - b).max() < 1e-5 * mx.abs(b).max() for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("chunk", [1 << 28, 20 * IN * 4])  # a packed weight unpacked as a whole, or 20 rows at a time
def test_outputs_and_all_gradients_equal_those_of_plain_operations(bits, scale, chunk, monkeypatch):
    monkeypatch.setattr(quantize, "CHUNK", chunk)
    weight = quantize.pack_if_possible(drawn(OUT, IN), bits)
    x, down, up, dy = drawn(2, 5, IN), drawn(RANK, IN), drawn(OUT, RANK), drawn(2, 5, OUT, seed=9)

    def plain(x, down, up):
        return x @ quantize.dense(weight).T + scale * ((x @ down.T) @ up.T)

    ys, grads = mx.vjp(lambda x, *pair: product(x, weight, pair, scale), [x, down, up], [dy])
    plain_ys, plain_grads = mx.vjp(plain, [x, down, up], [dy])
    assert close(ys, plain_ys)
    assert close(grads, plain_grads)
    assert close(mx.vjp(lambda x: product(x, weight), [x], [dy])[1], [dy @ quantize.dense(weight)])


def test_gradients_alone_do_not_compute_the_product_with_the_weight_again():
    """In a recomputed block nothing else needs the outputs of the last Linear."""
    weight, x, down, up, dy = drawn(OUT, IN), drawn(5, IN), drawn(RANK, IN), drawn(OUT, RANK), drawn(5, OUT)
    mx.eval(weight, x, down, up, dy)
    grads = mx.vjp(lambda x, *pair: product(x, weight, pair), [x, down, up], [dy])[1]
    graph = io.StringIO()
    mx.export_to_dot(graph, *grads)
    products = re.findall(r'"(Matmul|AddMM)"', graph.getvalue())
    assert sorted(products) == ["AddMM"] + 5 * ["Matmul"]  # dy W + dy B A; x A^T, dy B, and the gradients of A and of B
