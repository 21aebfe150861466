import mlx.core as mx
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner.backprop import loss_and_grads
from stages.tuner.memory import Footprint, Meter, budget, device_bytes, footprint
from tests.tuner.test_backprop import batch, loss_of, tiny, trained

FOOTPRINT = Footprint(
    held=1000,
    stream=10,
    kinds=("double",) * 2 + ("single",) * 4,
    grads={"double": 9, "single": 8},
    visit={"double": 120, "single": 100},
    kept={"double": 90, "single": 80},
)


def test_each_block_that_is_kept_costs_its_activations_instead_of_its_input():
    assert FOOTPRINT.need("blocks") == 1000 + 2 * 10 + 4 * 8 + 10 + 120  # in the last double
    assert FOOTPRINT.need(3) == 1000 + 3 * 10 + 3 * 8 + 3 * 80 + 20
    assert FOOTPRINT.need("whole") == FOOTPRINT.need(6) == 1000 + 4 * 8 + 2 * 9 + 4 * 80 + 2 * 90 + 30


@pytest.mark.parametrize(("limit", "plan"), [(5000, "whole"), (1580, "whole"), (1579, 5), (1182, "blocks"), (1313, 2)])
def test_the_plan_is_the_fastest_that_fits(limit, plan):
    assert FOOTPRINT.plan(limit) == plan
    assert FOOTPRINT.need(plan) <= limit


def test_what_cannot_fit_is_refused_with_the_settings_that_would():
    with pytest.raises(ValueError, match=r"needs 0.0 GB and may take 0.0 GB: batches of 93% .*base_bits = 8 or 4"):
        FOOTPRINT.plan(1170)
    with pytest.raises(ValueError, match="the weights alone fill it"):
        FOOTPRINT.plan(900)


@pytest.mark.parametrize("plan", ["blocks", "whole"])
def test_a_step_peaks_near_what_was_foretold(plan):
    model = tiny()
    adapters, scales = trained(model)
    inputs = {**batch(8), "ctx_BTJ": mx.random.normal((8, 200, 24)), "ctx_ids_T4": [[0, 0, 0, k] for k in range(200)]}
    mx.eval(model.top, [b.weights for b in model.blocks], adapters, inputs["ctx_BTJ"])
    found = footprint(model, adapters, scales, inputs)
    loss = loss_of(8)
    mx.eval(loss.keywords)
    mx.reset_peak_memory()
    mx.eval(loss_and_grads(model, adapters, scales, inputs, loss, plan, memory_limit=1))
    # The CPU backend frees when its thread gets to it.
    assert 0.6 < (mx.get_peak_memory() - found.held) / (found.need(plan) - found.held) < 1.5


def test_the_budget_is_the_setting_or_the_device_less_headroom():
    assert budget(2.5) == 2_500_000_000
    assert 0.5 * device_bytes() < budget() < device_bytes()


def test_a_meter_agrees_with_mlx_and_finds_a_planted_leak():
    meter, kept = Meter(), []
    for step in range(6):
        meter.step = step
        with meter.phase("work"):
            mx.eval(mx.zeros((1 << 20,)) + step)
            peak = mx.get_peak_memory()
        with meter.phase("leak"):
            kept.append(mx.zeros((1 << 19,)) + step)
            mx.eval(kept[-1])
    assert meter.rows[-2]["peak"] == peak
    assert meter.peak == max(row["peak"] for row in meter.rows)
    assert set(meter.leaks()) == {"leak"}
    assert meter.leaks(1 << 22) == {}
    assert meter.leaks()["leak"] == pytest.approx(4 << 19, rel=0.01)
