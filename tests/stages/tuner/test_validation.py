import math

import hypothesis.strategies as st
from hypothesis import given

from stages.tuner import validation
from stages.tuner.config import ValidationConfig

curves = st.lists(st.one_of(st.floats(0, 2), st.just(math.inf)), min_size=1, max_size=12)


def measured(losses, every=10):
    return {n * every: loss for n, loss in enumerate(losses)}


def test_an_incomplete_measurement_does_not_count_and_one_that_is_not_finite_has_an_infinite_mean():
    losses = [(0, 1.0), (0, 2.0), (10, 1.0), (20, 0.5), (20, math.nan)]
    assert validation.mean_losses(losses, 2) == {0: 1.5, 20: math.inf}


def test_patience_counts_measurements_since_the_best():
    losses = measured([1.0, 0.9, 0.95, 0.8, 0.81, 0.82, 0.7])
    assert validation.early_stop(losses, 10, 2) == 50
    assert validation.early_stop(losses, 10, 1) == 20
    assert validation.early_stop(losses, 10, 3) is None
    assert validation.early_stop(losses, 10, 1, min_delta=0.2) == 10
    assert validation.early_stop(measured([1.0, 1.1, 1.2]), 10, 2) == 20  # never better than the start
    assert validation.early_stop({0: 1.0, 20: 1.2}, 10, 1) is None  # nothing counts after a missing one


@given(curves, st.integers(1, 3))
def test_more_measurements_never_change_an_early_stop_that_was_decided(losses, patience):
    whole = validation.early_stop(measured(losses), 10, patience)
    for count in range(1, len(losses) + 1):
        seen = validation.early_stop(measured(losses[:count]), 10, patience)
        assert seen == (whole if whole is not None and whole <= 10 * (count - 1) else None)


def test_patience_and_the_steps_of_a_run_decide_its_last_step_and_no_later_one_is_the_best():
    curve = {0: 1.0, 10: 0.5, 20: 0.6, 30: 0.55, 40: 0.4}
    rows = [{"step": step, "split": "validation", "loss": loss} for step, loss in curve.items()]
    for patience, cases in ((2, {1000: (30, 10), 20: (20, 10)}), (None, {40: (40, 40), 39: (39, 10), 9: (9, None)})):
        for steps, decided in cases.items():
            made = validation.Validation(ValidationConfig(every=10, patience=patience), 1, steps)
            made.add(rows)
            assert (made.last_step, made.best_step) == decided
