"""How soon work is handed to a CUDA device: decided by the plan, before the device has its first operation."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from stages import fit, handover
from stages.models.flux2 import Flux2Config
from stages.models.weights import read_config
from stages.replay import replay
from stages.train import course_of
from stages.tuner import backprop
from tests.stages.runs import BASE, Run

ASKS = {"default_device", "set_default_device", "device_info", "is_available", "clear_cache", "reset_peak_memory"}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of a make-believe CUDA device, in order: every function of MLX that was called, and "decided"."""
    monkeypatch.setenv(backprop.BUFFER, "")
    monkeypatch.delenv(backprop.BUFFER)
    for module in (backprop, handover):
        monkeypatch.setattr(module, "hands_over_late", lambda: True)
    asked: list[str] = []
    away: list[bool] = []
    real_off, real_sooner = handover.off_device, handover.hand_over_sooner

    @contextmanager
    def off() -> Iterator[None]:
        away.append(True)
        with real_off():
            yield
        away.pop()

    def watched(name: str, function: Any, *given: Any, **named: Any) -> Any:
        if not away:
            asked.append(name)
        return function(*given, **named)

    monkeypatch.setattr(handover, "off_device", off)
    monkeypatch.setattr(handover, "hand_over_sooner", lambda plan: [asked.append("decided"), real_sooner(plan)][1])
    for module in (mx, mx.random, mx.fast):
        for name, function in list(vars(module).items()):
            if type(function).__name__ == "nb_func" and name not in ASKS:
                monkeypatch.setattr(module, name, functools.partial(watched, name, function))
    return asked


def between(run: Run) -> float:
    """GB that are enough for blocks and not for the whole graph."""
    context = run.context()
    ask = fit.Question(run.config, Flux2Config.from_dict(read_config(context.weights("transformer"))))
    found = ask.estimate(fit.largest(course_of(context)), 2)
    return (found.need("blocks") + found.need("whole")) / 2 / fit.GB


@pytest.mark.parametrize(
    ("change", "said"), [({"memory": "blocks"}, "200"), ({"memory": "whole"}, None), ({}, None), ({"memory_gb": 0.0}, "200")]
)
def test_a_run_decides_before_it_asks_anything_of_the_device(change, said, device, transformer, tmp_path):
    run = Run(tmp_path, transformer, replace(BASE, steps=1))
    change = {"memory_gb": between(run)} if "memory_gb" in change else change
    run.config = replace(run.config, **change)
    device.clear()
    run.go()
    assert device.count("decided") == 1 and device.index("decided") == 0
    assert {"zeros", "load", "eval"} <= set(device), "what was watched is what a run asks for"
    assert os.environ.get(backprop.BUFFER) == said


def test_a_run_that_goes_on_and_a_step_replayed_decide_by_the_plan_that_the_run_began_with(device, transformer, tmp_path):
    run = Run(tmp_path, transformer, replace(BASE, memory="blocks", steps=4)).go(stop_at=2)
    run.config = replace(run.config, memory="auto")
    for again in (run.go, lambda: replay(run.context(), 3)):
        del os.environ[backprop.BUFFER]
        device.clear()
        again()
        assert device[0] == "decided"
        assert os.environ[backprop.BUFFER] == "200"


def test_what_cannot_fit_is_said_by_fit_itself(device, transformer, tmp_path):
    run = Run(tmp_path, transformer, replace(BASE, memory_gb=1e-6))
    with pytest.raises(ValueError, match=r"would need .* GB, too much as well; a smaller family"):
        run.go()


def test_off_the_device_operations_are_made_for_the_cpu_and_afterwards_for_what_it_was(monkeypatch):
    made: list[Any] = []
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx, "set_default_device", made.append)
    with pytest.raises(KeyboardInterrupt), handover.off_device():
        assert made == [mx.cpu]
        raise KeyboardInterrupt
    assert made == [mx.cpu, mx.gpu]
