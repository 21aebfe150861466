import mlx.core as mx
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner import lora, quantize
from stages.tuner.product import product

OUT, IN, RANK, WIDTHS = 96, 128, 4, [32, 16, 48]


def drawn(*shape, seed=0):
    return mx.random.normal(shape, key=mx.random.key(seed + sum(shape)))


def cut(y, widths):
    return mx.split(y, [sum(widths[: n + 1]) for n in range(len(widths) - 1)], axis=-1)


def in_plain_words(x, weight, down, up, scale):
    """Parts of a wide result, differentiated by the framework."""
    return cut(x @ weight.T + scale * ((x @ down.T) @ up.T), WIDTHS)


def close(found, wanted):
    return all(mx.abs(a - b).max() < 1e-5 * mx.abs(b).max() for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("chunk", [1 << 28, 20 * IN * 4])  # a packed weight unpacked as a whole, or 20 rows at a time
def test_outputs_in_parts_and_all_gradients_are_those_of_one_wide_product(bits, scale, chunk, monkeypatch):
    monkeypatch.setattr(quantize, "CHUNK", chunk)
    weight = quantize.fit(drawn(OUT, IN), bits)
    x, down, up = drawn(2, 5, IN), drawn(RANK, IN), drawn(OUT, RANK)
    dys = [drawn(2, 5, width, seed=9) for width in WIDTHS]
    ys, grads = mx.vjp(lambda x, *pair: product(x, weight, WIDTHS, pair, scale), [x, down, up], dys)
    plain_ys, plain_grads = mx.vjp(lambda x, *pair: in_plain_words(x, quantize.dense(weight), *pair, scale), [x, down, up], dys)
    assert [y.shape for y in ys] == [(2, 5, width) for width in WIDTHS]
    assert close(ys, plain_ys)
    assert close(grads, plain_grads)


def test_a_part_that_nothing_is_made_of_has_no_share_in_the_gradient():
    weight, x, down, up = drawn(OUT, IN), drawn(2, 5, IN), drawn(RANK, IN), drawn(OUT, RANK)
    _, plain = mx.value_and_grad(lambda *a: mx.square(in_plain_words(*a, 1.0)[1]).sum(), argnums=(0, 2, 3))(x, weight, down, up)
    _, found = mx.value_and_grad(lambda x, *pair: mx.square(product(x, weight, WIDTHS, pair)[1]).sum(), argnums=(0, 1, 2))(
        x, down, up
    )
    assert close(found, plain)


@pytest.mark.parametrize("variant", ["lora", "dora", "lokr"])
def test_every_kind_of_adapter_gives_its_outputs_in_parts_too(variant):
    weight, x = drawn(OUT, IN), drawn(2, 5, IN)
    targets = lora.choose({"q": (OUT, IN)}, ["*"], RANK, alpha=2.0, variant=variant)
    arrays = {name: value + 0.1 * drawn(*value.shape) for name, value in lora.init(targets, 0, {"q": weight}).items()}
    apply = lora.linear(arrays, lora.scales(targets))
    parts, wide = apply("q", weight, x, WIDTHS), apply("q", weight, x)
    assert [part.shape[-1] for part in parts] == WIDTHS
    assert close(parts, cut(wide, WIDTHS))
    assert not close(parts, cut(x @ weight.T, WIDTHS))


def test_parts_that_do_not_make_up_the_outputs_are_a_mistake_of_ours():
    with pytest.raises(AssertionError, match="96 outputs"):
        product(drawn(5, IN), drawn(OUT, IN), [32, 32])
