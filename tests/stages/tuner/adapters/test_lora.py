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


def test_values_go_to_the_block_whose_whole_name_begins_their_key_in_the_order_of_the_keys():
    values = {"deep.blocks.10.q.B": 1, "deep.blocks.1.v.B": 2, "deep.blocks.1.q.B": 3, "deep.blocks.100.q.B": 4, "deep": 5}
    found, unknown = lora.split_by_block(["deep.blocks.1", "deep.blocks.2", "deep.blocks.10"], values)
    assert [list(own.items()) for own in found] == [[("v.B", 2), ("q.B", 3)], [], [("q.B", 1)]]
    assert unknown == ["deep.blocks.100.q.B", "deep"]
