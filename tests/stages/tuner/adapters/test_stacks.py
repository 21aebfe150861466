import mlx.core as mx

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner.adapters import stacks

SHAPES = {f"blocks.{n}.{array}": shape for n in range(4) for array, shape in (("A", (4, 96)), ("B", (80, 4)), ("m", (6,)))}
ARRAYS = {name: mx.random.normal(shape, key=mx.random.key(n)) for n, (name, shape) in enumerate(SHAPES.items())}


def test_matrices_of_one_shape_share_a_stack_whatever_the_order_of_names(monkeypatch):
    groups = stacks.group_by_shape(ARRAYS)
    assert groups["blocks.0.A"] == [f"blocks.{n}.A" for n in range(4)]
    assert groups["blocks.2.m"] == ["blocks.2.m"]
    assert groups == stacks.group_by_shape(dict(reversed(ARRAYS.items())))
    back = stacks.unstack(stacks.stack(ARRAYS, groups), groups)
    assert set(back) == set(ARRAYS)
    assert all(mx.array_equal(back[name], value) for name, value in ARRAYS.items())
    monkeypatch.setattr(stacks, "LARGEST", 3 * 4 * 96)
    assert [len(names) for first, names in stacks.group_by_shape(ARRAYS).items() if first.endswith("A")] == [3, 1]
