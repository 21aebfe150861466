"""Warnings of a run that begins wrongly, on the bundled model `micro` and on one with embedded guidance made from it. Sound runs
give none.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.tuner.health import LossCheck
from stages.tuner.task import ExpectedLoss
from tests.projects import ROOT
from tests.stages.text_to_image.train import sound_runs
from tests.stages.text_to_image.train.sound_runs import Case, guidance_cases, long_cases, planted_cases, problem, run, sound_cases

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def few_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.config.getoption("--prove"):
        monkeypatch.setattr(sound_runs, "CROPS", 4)
        monkeypatch.setattr(sound_runs, "SIDE", 96)


def run_all(chosen: list[Case], folder: Path) -> None:
    for case in chosen:
        assert not problem(case, run(case, folder / case.name)), case.name


@pytest.mark.proof("each of three planted mistakes in latents and embeddings is named before the first step")
def test_a_planted_mistake_is_named_before_the_first_step(tmp_path: Path, cases: Callable[[int, int], int]) -> None:
    run_all(planted_cases(cases(1, 3)), tmp_path)


@pytest.mark.proof("a wrong guidance in training is named before step 50, and a right one is not")
def test_a_wrong_guidance_raises_the_loss_and_is_named(tmp_path: Path, cases: Callable[[int, int], int]) -> None:
    seeds = cases(1, 3)
    run_all(guidance_cases(seeds, 6 if seeds == 1 else 50), tmp_path)


# The short forms of the tests around it have sound runs too.
@pytest.mark.proof("twenty sound runs, with each optimizer and variant at its default rate, give no warning", long=True)
def test_a_sound_run_gives_no_warning(tmp_path: Path) -> None:
    run_all(sound_cases(), tmp_path)


@pytest.mark.proof("500 steps of every optimizer and variant at its default rate lower the loss and end", long=True)
def test_five_hundred_steps_are_stable(tmp_path: Path) -> None:
    run_all(long_cases(), tmp_path)


def checked(losses: list[float], *, past: int = 0) -> list[str]:
    """Lines about losses of one sample per step, the first `past` of an earlier process."""
    said: list[str] = []
    rows = [{"step": n, "split": "train", "loss": loss} for n, loss in enumerate(losses, 1)]
    expected = ExpectedLoss(lambda row: 2.0, "nobody", (0.2, 1.0), "measured", "look")
    check = LossCheck(said.append, expected, rows[:past])
    for row in rows[past:]:
        check.after(row["step"], [row])
    return said


def test_a_loss_outside_of_what_is_expected_is_named_once_also_across_a_resume() -> None:
    low, right, high = ([level + 0.01 * (n % 5) for n in range(40)] for level in (0.1, 1.0, 2.5))
    assert checked(right) == []
    assert [line.partition(" look")[0] for line in (*checked(low), *checked(high))] == ["step 12:", "step 12:"]
    assert checked(high)[0] == "step 12: look (the loss is 1.26 times that of nobody; expected: 0.2 to 1, measured)"
    assert checked(high, past=20) == []
    assert checked([*high[:3], float("nan"), *[9.0] * 5]) == []


def test_a_loss_that_collapses_after_the_start_ends_the_run_and_one_that_was_never_low_does_not() -> None:
    said = (
        r"^train: stopped at step \d\d: the loss has collapsed, from 0\.3\d to 1\.\d\d times that of a model that knows nothing"
    )
    noise = [0.02 * (n % 5) for n in range(200)]
    with pytest.raises(ValueError, match=said):
        checked([0.6 + each for each in noise[:60]] + [4 + each for each in noise])
    assert checked([1.8 + each for each in noise]) == checked([0.6 + each for each in noise]) == []


ROWS = [json.loads(line) for line in (ROOT / "data" / "measurements" / "sound_runs.jsonl").read_text().splitlines()]
CASES = [*long_cases(), *guidance_cases(), *sound_cases(), *planted_cases()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_measured_run_did_as_it_should(case: Case) -> None:
    row = next(row for row in ROWS if row["case"] == case.name)
    assert (row["steps"], row["problem"], len(row["warnings"])) == (case.config.steps, "", bool(case.warning))
    assert row["last"] < row["first"] or not case.falls
