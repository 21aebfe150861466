"""The experiment about regularisation images: its settings are valid, and its table compares the runs with the plain one."""

import pytest

from data import DOCS, MEASUREMENTS
from data.research.experiments import regularisation
from data.research.experiments.recipes import COLUMNS, EXAMPLE
from data.research.experiments.regularisation import KINDS, PLAIN, RUNS
from pipeline.project.project import Project


@pytest.mark.parametrize("name", RUNS)
def test_the_settings_of_every_run_are_valid_and_its_rate_falls_to_the_end(name):
    settings = regularisation.settings(name, 300)
    config = Project(EXAMPLE, settings | {"captions.class_word": regularisation.CLASS}).config.sections["train"]
    assert config.schedule.warmup_steps + config.schedule.decay_steps == config.steps == 300 * RUNS[name][1]
    assert bool(config.data.regularisation) + bool(config.preservation) == (name != PLAIN)


def test_no_prompt_is_about_a_subject_that_is_trained_and_each_kind_has_its_word():
    found = regularisation.prompts()
    assert [len(found[kind]) for kind in KINDS] == [40, 20, 20]
    captions = (EXAMPLE / "images" / "metadata.jsonl").read_text()
    assert not any(prompt.removeprefix("{trigger}, ") in captions for prompt in found["trigger"])
    assert found["class"][0] == f"icon, {found['none'][0]}" and found["trigger"][0] == f"{{trigger}}, {found['none'][0]}"


def test_the_table_has_a_line_for_each_run_and_its_cost_beside_the_plain_run():
    scores = {"scores": {name: [[0.0, 1.0]] * 4 for name in COLUMNS}, "moved": [8.0, 10.0]}
    rows = [
        {"run": name, "set": {"train.steps": 300}, "loss": 0.3, "step_seconds": seconds} | dict.fromkeys(KINDS, scores)
        for name, seconds in ((PLAIN, 0.1), ("preservation", 0.25), ("preservation", 0.35))
    ]
    plain, preserved = regularisation.table(rows).splitlines()[2:]
    assert plain.startswith("| neither | 1 | 1.000 ") and plain.endswith(" 0.300 | 1.00 |")
    assert preserved.startswith("| preservation | 2 | ") and "| 9.0 (9.0 to 9.0) |" in preserved and preserved.endswith(" 2.50 |")


def test_the_page_shows_the_committed_rows():
    rows = regularisation.read_rows(MEASUREMENTS / "regularisation.jsonl")
    assert regularisation.table(rows) in (DOCS / "experiments" / "regularisation.md").read_text()
