import mlx.core as mx
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner import quantize
from stages.tuner.adapters.merge import check_shapes
from stages.tuner.adapters.targets import target_scales
from tests.stages.tuner.adapters.merging import merged_weights
from tests.stages.tuner.adapters.models import adapted, batch, linear_for, tiny
from tests.stages.tuner.adapters.variants import IN, OUT, VARIANTS, targets_of, trained


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bits", [16, 8])
def test_a_merged_model_computes_what_the_adapted_model_computes(variant, bits):
    model = tiny()
    if bits < 16:
        for block in model.blocks:
            block.weights.update({name: quantize.pack_if_possible(weight, bits) for name, weight in block.weights.items()})
    adapters, scales = adapted(model, variant)
    want = model(**batch(), linear_for=linear_for(adapters, scales))
    base = model(**batch(), linear_for=linear_for({}, {}))
    weights = {f"{block.name}.{name}": weight for block in model.blocks for name, weight in block.weights.items()}
    new = merged_weights(weights, adapters, scales)
    for block in model.blocks:
        block.weights.update({n.removeprefix(f"{block.name}."): w for n, w in new.items() if n.startswith(f"{block.name}.")})
    found = model(**batch(), linear_for=linear_for({}, {}))
    assert mx.linalg.norm(want - base) > 0.1 * mx.linalg.norm(base)
    assert mx.abs(found - want).max().item() < 2e-5


def test_a_merge_into_another_model_is_refused_with_both_shapes():
    target = targets_of({"q": (OUT, IN)}, "lokr")
    arrays = trained(target, {})
    with pytest.raises(ValueError, match=r"q must have the shape \(8, 64\), got \(48, 32\)"):
        check_shapes({"q.weight": (8, 64)}, arrays, target_scales(target))
    with pytest.raises(ValueError, match="the adapter has q, which the model lacks"):
        check_shapes({"k.weight": (OUT, IN)}, arrays, target_scales(target))
