"""What is said of a run while it goes on, where there is no terminal."""

import re

import pytest

from pipeline import terminal
from pipeline.terminal import Terminal


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    return now


def lines(capsys) -> list[str]:
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("unit", ["image", "images"])
def test_progress_without_a_terminal_is_a_line_now_and_then_with_rate_and_time_left(clock, capsys, unit):
    with Terminal("latents") as shown:
        for done in range(0, 101, 2):
            shown.progress(done, 200, unit)
            clock[0] += 1
    said = lines(capsys)
    assert 2 <= len(said) <= 4
    assert all(re.fullmatch(r"latents: \d+ of 200 images, 2\.0 images/s, .* left", line) for line in said)


def test_a_run_that_goes_on_is_not_faster_than_it_is(clock, capsys):
    with Terminal("train") as shown:
        for step in range(1000, 1005):
            shown.progress(step, 1010, "step")
            clock[0] += 10
    assert lines(capsys)[-1] == "train: 1004 of 1010 steps, 10.0 s/step, 1 min 0 s left"
