import typing

import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner.optimizers.methods import METHODS, MethodName, make_optimizer


def test_every_method_that_can_be_named_exists():
    assert typing.get_args(MethodName) == tuple(METHODS)


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        (
            "adamw8bt",
            {},
            "kind must be one of adamw, adamw8bit, adafactor, lion, prodigy, got 'adamw8bt'; did you mean adamw8bit?",
        ),
        ("sgd", {}, "kind must be one of adamw, adamw8bit, adafactor, lion, prodigy, got 'sgd'"),
        ("lion", {"beta_1": 0.9}, "beta_1 is not a setting of lion, which has beta1, beta2, weight_decay; did you mean beta1?"),
        ("adamw", {"eps": 0.0}, "eps must be >= 1e-30, got 0.0"),
        ("lion", {"eps": 1e-8}, "eps is not a setting of lion, which has beta1, beta2, weight_decay"),
        ("adamw", {"beta2": 1.0}, "beta2 must be >= 0 and < 1, got 1.0"),
        ("prodigy", {"weight_decay": -1}, "weight_decay must be >= 0, got -1"),
    ],
)
def test_an_unknown_name_or_a_number_out_of_range_is_refused_in_one_line(name, numbers, message):
    with pytest.raises(ValueError) as error:
        make_optimizer(name, **numbers)
    assert str(error.value) == message


def test_numbers_that_are_left_out_have_their_defaults():
    made = make_optimizer("prodigy", d_coef=0.5, beta3=None)
    assert (made.d_coef, made.beta3, made.beta1, made.usual_lr) == (0.5, None, 0.9, 1.0)
