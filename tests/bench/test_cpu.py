import click
import pytest

from tests.bench import cpu


@pytest.mark.proof("the comparison with PyTorch on a CPU takes steps on both sides", long=True)
def test_both_sides_take_steps_in_turns_and_give_ratios():
    pytest.importorskip("peft")
    row = cpu.compare(cpu.Shape(batch=1, pixels=64, rank=2), 1, 1)
    assert row["least_s_ratio"] == row["mlx_least_s"] / row["torch_least_s"]
    assert row["torch_peak_gb"] > 0 and row["threads"] == 1


def test_a_side_that_fails_ends_the_comparison_with_its_name(monkeypatch):
    monkeypatch.setattr(cpu.sys, "executable", "/bin/false")
    with pytest.raises(click.ClickException, match="mlx ended with exit status 1"):
        cpu.compare(cpu.Shape(), 1, 1)
