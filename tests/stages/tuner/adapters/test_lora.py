import mlx.core as mx
import numpy as np

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner.adapters import lora
from stages.tuner.adapters.initial import fresh_adapter
from stages.tuner.adapters.targets import select_targets


def test_a_linear_adds_the_scaled_adapter_and_returns_the_dtype_of_its_input():
    draw = np.random.default_rng(0)
    W, A, B, x = (draw.normal(size=s).astype(np.float32) for s in ((6, 8), (2, 8), (6, 2), (3, 8)))
    apply = lora.adapted_linear({"q.lora_A.weight": mx.array(A), "q.lora_B.weight": mx.array(B)}, {"q": 0.5})
    np.testing.assert_allclose(np.array(apply("q", mx.array(W), mx.array(x))), x @ (W + 0.5 * B @ A).T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.array(apply("k", mx.array(W), mx.array(x))), x @ W.T, rtol=1e-4, atol=1e-5)
    assert apply("q", mx.array(W).astype(mx.bfloat16), mx.array(x).astype(mx.bfloat16)).dtype == mx.bfloat16


def test_the_largest_change_is_the_largest_magnitude_of_any_b():
    adapters = fresh_adapter(select_targets({f"blocks.{n}.to_q": (8, 8) for n in range(2)}, ["*"], 4), 0)
    assert lora.largest_change(adapters).item() == 0
    adapters["blocks.1.to_q.lora_B.weight"] -= 0.25
    assert lora.largest_change(adapters).item() == 0.25
