"""The rows of data/measurements/sound_runs.jsonl: what sound runs and runs with a planted mistake did on the bundled model
`micro`.
"""

from __future__ import annotations

import json

import pytest

from tests.projects import ROOT
from tests.stages.text_to_image.train.sound_runs import guidance_cases, long_cases, planted_cases, sound_cases

ROWS = [json.loads(line) for line in (ROOT / "data" / "measurements" / "sound_runs.jsonl").read_text().splitlines()]
CASES = [*long_cases(), *guidance_cases(), *sound_cases(), *planted_cases()]


def test_the_rows_hold_every_run_once():
    assert sorted(row["case"] for row in ROWS) == sorted(case.name for case in CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_run_did_as_it_should(case):
    row = next(row for row in ROWS if row["case"] == case.name)
    assert (row["steps"], row["problem"], len(row["warnings"])) == (case.config.steps, "", bool(case.warning))
    assert row["last"] < row["first"] or not case.falls
