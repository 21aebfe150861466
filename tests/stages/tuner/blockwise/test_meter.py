import mlx.core as mx
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner.blockwise.meter import BETWEEN, LEAK_BYTES, LEAST_TIMES, Meter


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


def meter_of(*steps: dict[str, int]) -> Meter:
    """A meter whose phases added these bytes, or freed them where negative."""
    meter, active = Meter(), 0
    for step, changes in enumerate(steps):
        for phase, change in changes.items():
            meter.rows.append({"step": step, "phase": phase, "before": active, "active": active + change})
            active += change
    return meter


def test_a_small_steady_growth_is_found_with_its_bytes_per_step():
    noisy = [{"batch": 30_000 + 6_000 * (-1) ** n + 900, "work": 50_000, "rest": -50_900} for n in range(20)]
    assert meter_of(*noisy).leaks() == {"batch": pytest.approx(30_000, rel=0.02)}
    assert meter_of(*[{"batch": LEAK_BYTES} for _ in range(LEAST_TIMES)]).leaks() == {"batch": LEAK_BYTES}
    assert meter_of(*[{"batch": LEAK_BYTES - 1} for _ in range(20)]).leaks() == {}


def test_memory_freed_or_added_between_phases_counts():
    meter = Meter()
    for step in range(8):
        sizes = {"before": 10**5 * step, "active": 10**5 * step + 10**6}  # nine tenths of the million are freed
        meter.rows.append({"step": step, "phase": "work"} | sizes)
    assert meter.leaks() == {"work": 10**5}
    for row in meter.rows:
        row["active"] = row["before"]
    assert meter.leaks() == {BETWEEN: 10**5}


def test_growth_in_a_single_step_or_in_too_few_steps_is_no_leak():
    for grown in range(20):
        assert meter_of(*[{"batch": 10**9 if n == grown else 0} for n in range(20)]).leaks() == {}
    few = meter_of(*[{"batch": 10**9} for _ in range(LEAST_TIMES - 1)])
    assert (few.can_find_leaks, few.leaks()) == (False, {})
    assert meter_of(*[{"batch": 10**9} for _ in range(LEAST_TIMES)]).can_find_leaks
