import mlx.core as mx
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner.memory import Meter, budget, device_bytes


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
