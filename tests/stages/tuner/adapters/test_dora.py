import mlx.core as mx

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner import quantize
from stages.tuner.adapters import dora, lora
from stages.tuner.adapters.initial import fresh_adapter
from stages.tuner.adapters.targets import select_targets
from tests.stages.tuner.adapters.variants import normal


def test_a_magnitude_is_not_rounded_to_half_precision():
    weight, x = mx.eye(8, dtype=mx.bfloat16), mx.full((4096, 8), 1.5, mx.bfloat16)
    target = select_targets({"q": (8, 8)}, ["*"], 2, variant="dora")
    arrays = fresh_adapter(target, 0, {"q": weight})

    def run(magnitude):
        return lora.adapted_linear({**arrays, "q.lora_magnitude_vector": magnitude}, {"q": 1.0})("q", weight, x)

    (y,), (grad,) = mx.vjp(run, [arrays["q.lora_magnitude_vector"] * (1 + 3 / 256)], [mx.ones((4096, 8), mx.bfloat16)])
    assert y[0, 0].item() == 1.515625  # 1.5 (1 + 3/256), rounded once; with 1 + 3/256 rounded first it were 1.5234375
    assert mx.array_equal(grad, mx.full((8,), 4096 * 1.5))  # a sum that half precision cannot reach by adding


def test_row_norms_are_equal_for_chunks_of_any_size(monkeypatch):
    weight, down, up = normal(1, 24, 64), normal(2, 4, 64), normal(3, 24, 4)
    for base in (weight, quantize.pack(weight, 8)):
        whole = dora.row_norms(base, down, up, 0.5)
        assert mx.allclose(whole, mx.linalg.norm(quantize.dense(base) + 0.5 * up @ down, axis=1), rtol=1e-6)
        with monkeypatch.context() as patch:
            patch.setattr(dora, "CHUNK", 64 * 7)
            assert mx.allclose(dora.row_norms(base, down, up, 0.5), whole, rtol=1e-6)
