"""What `latentmill evaluate` says of scores that are known."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.commands import evaluate
from pipeline.project.project import NotBuilt, Project
from tests import projects

PROMPTS = [f"prompt {n}" for n in range(20)]


def row(kind, prompt, style, real, rank, step=0):
    named = {"kind": kind, "prompt": prompt, "step": step, "adapter_id": "a" * 64 if kind == "adapter" else ""}
    return named | {"style": style, "real": real, "agreement": 1 / rank, "agreement_rank": rank, "texts": 20}


def rows(gain):
    """An adapter that moves every picture by `gain` along both axes."""
    draw = np.random.default_rng(0)
    made = []
    for prompt in PROMPTS:
        place, rank = draw.normal(0, 0.2), int(draw.integers(1, 5))
        made.append(row("base", prompt, place, place, rank))
        made.append(row("adapter", prompt, place + gain, place + gain, rank, step=40))
        made.append(row("real", prompt, 1.0, 1.0, 1))
    return made


def told(gain):
    groups = evaluate.grouped(rows(gain))
    return [*(" ".join(evaluate.line(name, group)) for name, group in groups.items()), *evaluate.notes(groups)]


def test_base_adapter_and_real_stand_side_by_side():
    base, adapter, real = (line.split() for line in told(0.8)[:3])
    assert base[0] == "base" and adapter[:2] == ["step", "40"] and " ".join(real) == "real 20 1.00 1.00 1.00 1 1.00 1.00"
    assert float(adapter[4]) == pytest.approx(float(base[2]) + 0.8, abs=0.011)


def test_an_adapter_that_changes_nothing_is_told_from_one_that_does():
    def auc(gain):
        (line,) = [line for line in told(gain) if "style above" in line]
        return float(line.split("AUC ")[1].split()[0])

    assert auc(0.0) == 0.5
    assert auc(0.2) > 0.6 and auc(2.0) == 1.0


def test_the_interval_holds_the_value_and_is_the_same_every_time():
    pairs = [(np.array([0.1 * n]), np.array([0.1 * n + 0.3])) for n in range(20)]
    value, low, high = evaluate.interval(pairs, evaluate.auc)
    assert low < value < high and evaluate.interval(pairs, evaluate.auc) == (value, low, high)


def test_agreement_is_said_over_chance():
    found = told(0.8)
    assert "ranks are among 20 texts; by chance: median 10.5, R@1 0.05, R@10 0.50" in found
    assert any(line.startswith("R@10 over chance") and "base 1.00" in line for line in found)
    assert any("agreement less the base's 0.000 (0.000 to 0.000)" in line for line in found)


def test_without_a_map_or_an_adapter_only_what_there_is_is_said():
    groups = evaluate.grouped([row("base", "a", None, None, 1) | {"agreement": None, "agreement_rank": None}])
    assert " ".join(evaluate.line("base", groups["base"])) == "base 1 - - - - - -"
    assert len(list(evaluate.notes(groups))) == 1


def test_without_scores_the_command_that_makes_them_is_named(tmp_path, tiny_weights):
    folder = projects.make(tmp_path / "project", tiny_weights, images=2)
    with pytest.raises(NotBuilt, match="make"):
        list(evaluate.evaluate(Project(folder)))


def test_a_built_project_is_told_line_by_line(tmp_path, tiny_weights):
    folder = projects.make(tmp_path / "project", tiny_weights, images=2)
    projects.build(folder)
    lines = list(evaluate.evaluate(Project(folder)))
    assert lines[1].startswith("base ") and lines[2].startswith("step 2 (")
