"""The summary that `latentmill evaluate` prints of known scores."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pipeline.commands.text_to_image import evaluate
from pipeline.project import runs
from pipeline.project.project import Project
from tests import projects


def row(kind, prompt, style, real, step=0):
    named = {"kind": kind, "prompt": prompt, "step": step, "adapter_id": "a" * 64 if kind == "adapter" else ""}
    return named | {"style": style, "real": real}


def test_an_adapter_that_changes_nothing_differs_from_one_that_does_and_the_interval_holds_the_value():
    def auc(gain):
        """Of an adapter that moves every picture by `gain` along both axes."""
        draw, made = np.random.default_rng(0), []
        for prompt in (f"prompt {n}" for n in range(20)):
            place = draw.normal(0, 0.2)
            made.append(row("base", prompt, place, place))
            made.append(row("adapter", prompt, place + gain, place + gain, step=40))
        base, adapter = evaluate.group_rows(made).items()
        (line,) = [line for line in evaluate.comparisons(adapter[0], base[1], adapter[1]) if "style above" in line]
        return float(line.split("AUC ")[1].split()[0])

    assert auc(0.0) == 0.5
    assert auc(0.2) > 0.6 and auc(2.0) == 1.0
    pairs = [(np.array([0.1 * n]), np.array([0.1 * n + 0.3])) for n in range(20)]
    value, low, high = evaluate.auc_interval(pairs)
    assert low < value < high and evaluate.auc_interval(pairs) == (value, low, high)
    measured = [row("base", prompt, style, None) for prompt, style in (("a", 0.5), ("b", 1.0), ("c", None))]
    assert evaluate.summary_cells("base", measured) == ("base", "3", "0.75", "-"), "a dash for what is not measured"


def test_without_a_finished_run_nothing_is_trained_and_the_command_that_finishes_one_is_named(tmp_path, tiny_weights):
    folder = projects.make(tmp_path / "project", tiny_weights, images=2)
    assert "no finished run to score; make train" in projects.latentmill(folder, "evaluate", code=2)
    assert not list(folder.glob("tables/*/"))


@pytest.mark.slow
def test_the_finished_run_is_scored_as_it_is_though_a_caption_has_changed(tmp_path, tiny_weights):
    folder = projects.make(tmp_path / "project", tiny_weights, images=2)
    projects.edit(folder, "steps = 6", "steps = 2")
    projects.build(folder, *(name for name in Project(folder).stage_names if name != "scores"))
    said = projects.latentmill(folder, "evaluate")
    assert "scored as it is" not in said and "there is one prompt only" in said
    groups = [line.split()[0] for line in said.splitlines() if re.match(r"base |step \d+ \(", line)]
    assert groups[:2] == ["base", "step"]
    projects.edit(folder, '["a red thing"]', '["a red thing", "the \\"blue\\" thing"]')
    (folder / "images" / "picture0.txt").write_text("other words")
    projects.build(folder, "captions")  # even so, when no run is that of the present tables
    (run,) = runs.find_runs(Project(folder))
    said = projects.latentmill(folder, "evaluate")
    assert f"the run {run.recipe} is scored as it is; pictures, captions or settings have changed since" in said
    assert " would do: 2 texts, 2 steps" in said and "one prompt only" not in said
    assert [each.recipe for each in runs.find_runs(Project(folder))] == [run.recipe]
