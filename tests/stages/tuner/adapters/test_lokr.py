import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner.adapters import lokr
from stages.tuner.adapters.targets import select_targets
from tests.stages.tuner.adapters.variants import IN, OUT, PEFT_NAMES, in_peft, normal, targets_of


def test_a_dimension_is_factorized_as_in_pefts_lokr():
    from peft.tuners.lokr.layer import factorization

    for dimension in (7, 12, 24, 127, 128, 3072, 9216, 27648):
        for factor in (2, 3, 4, 8, 10, 16):
            if factor * factor <= dimension:
                assert lokr.factorize(dimension, factor) == factorization(dimension, factor)
        assert lokr.factorize(dimension, None) == factorization(dimension, -1)


@pytest.mark.parametrize("rank", [1, 5, 6, 7, 12, 40])
def test_a_lokr_has_the_array_shapes_of_pefts_at_every_rank(rank):
    target = select_targets({"q": (OUT, IN)}, ["*"], rank, variant="lokr", factor=4)[0]
    module = in_peft("lokr", normal(5, OUT, IN), {}, target)
    wanted = {name: tuple(value.shape) for name, value in module.named_parameters() if "lokr" in name}
    assert {PEFT_NAMES[ending]: shape for ending, shape in target.shapes.items()} == wanted


def test_a_whole_second_factor_has_a_scale_of_one():
    low, whole = (targets_of({"q": (OUT, IN)}, name)[0] for name in ("lokr", "whole lokr"))
    assert lokr.W2_A in targets_of({"q": (96, 64)}, "lokr")[0].shapes
    assert lokr.W2 in whole.shapes and whole.scale == 1
    assert targets_of({"q": (96, 64)}, "lokr")[0].scale == 1.5
    assert lokr.W1 in low.shapes
