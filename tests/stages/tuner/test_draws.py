import numpy as np

from stages.tuner import draws


def test_an_address_always_draws_the_same_and_no_other_address_does():
    first = draws.normal((4, 5), 1, "noise", 7, 0)
    draws.normal((100,), 1, "noise", 8, 0)
    assert first.dtype == np.float32
    assert np.array_equal(first, draws.normal((4, 5), 1, "noise", 7, 0))
    others = [(2, "noise", 7, 0), (1, "sigma", 7, 0), (1, "noise", 8, 0), (1, "noise", 7, 1), (1, "noise", 70), (1, "noise", 7)]
    assert all(not np.array_equal(first, draws.normal((4, 5), *address)) for address in others)


def test_draws_are_those_of_every_machine():
    assert draws.uniform(0, "dropout", 3, 1) == 0.3722404363264912
    assert draws.permutation(6, 0, "order", 0, 0) == [5, 3, 2, 1, 0, 4]
    assert draws.normal((2,), 0, "noise", 1, 0).tolist() == [0.04822162538766861, 0.3517173230648041]
