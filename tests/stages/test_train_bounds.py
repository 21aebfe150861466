"""What holds a training run's memory in bounds: in its steps, in its measurements, and when a step is replayed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages import fit, trainer
from tests.stages.runs import BASE, Run, weights
from tests.tuner.test_backprop import limit_now


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weights(tmp_path_factory.mktemp("weights") / "transformer")


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bounds that fit chooses."""
    found: list[int] = []
    real = fit.choose

    def choose(*given: Any) -> fit.Fit:
        chosen = real(*given)
        found.append(chosen.bound)
        return chosen

    monkeypatch.setattr(fit, "choose", choose)
    return found


def limits_in(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """MLX's limit whenever the trainer calls this function of its own."""
    seen: list[int] = []
    real = getattr(trainer, name)
    monkeypatch.setattr(trainer, name, lambda *given: [seen.append(limit_now()), real(*given)][1])
    return seen


@pytest.mark.parametrize("plan", ["blocks", "whole"])
def test_in_every_step_of_a_run_the_limit_is_what_fit_chose_and_then_what_it_was(
    plan, bounds, transformer, tmp_path, monkeypatch
):
    before, seen = limit_now(), limits_in(monkeypatch, "loss_and_grads")
    Run(tmp_path, transformer, replace(BASE, steps=2, memory=plan, memory_gb=0.3)).go()
    assert seen == bounds * 2
    assert limit_now() == before
    assert bounds[0] == 0.3e9 if plan == "whole" else 0 < bounds[0] < 0.3e9
