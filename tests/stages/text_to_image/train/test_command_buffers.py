"""How soon work is handed to a CUDA device: decided before the device has its first operation, as MLX asks but once."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from stages.text_to_image.train.task import ImageTask
from stages.tuner import loop
from stages.tuner import replay as tuner_replay
from stages.tuner.blockwise import device as compute_device
from stages.tuner.replay import replay_step
from tests.stages.text_to_image.train.runs import BASE, Run

ASKS = {"default_device", "set_default_device", "device_info", "is_available", "clear_cache", "reset_peak_memory"}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of a make-believe CUDA device, in order: every function of MLX that was called, and "decided"."""
    monkeypatch.setenv(compute_device.BUFFER_VARIABLE, "")
    monkeypatch.delenv(compute_device.BUFFER_VARIABLE)
    monkeypatch.setattr(compute_device, "gathers_large_command_buffers", lambda: True)
    asked: list[str] = []
    real = compute_device.configure_scheduler

    def watched(name: str, function: Any, *given: Any, **named: Any) -> Any:
        asked.append(name)
        return function(*given, **named)

    for module in (loop, tuner_replay):
        monkeypatch.setattr(module, "configure_scheduler", lambda: [asked.append("decided"), real()][1])
    for library in (mx, mx.random, mx.fast):
        for name, function in list(vars(library).items()):
            if type(function).__name__ == "nb_func" and name not in ASKS:
                monkeypatch.setattr(library, name, functools.partial(watched, name, function))
    return asked


def test_command_buffers_are_limited_before_the_first_operation_of_any_run_or_replay(device, transformer, tmp_path):
    run = Run(tmp_path, transformer, replace(BASE, steps=4))
    for step in (lambda: run.go(stop_at=2), run.go, lambda: replay_step(run.context(), ImageTask(run.context()), 3)):
        device.clear()
        os.environ.pop(compute_device.BUFFER_VARIABLE, None)
        step()
        assert device.count("decided") == 1 and device.index("decided") == 0
        assert {"load", "eval"} <= set(device), "what was watched is what a run asks for"
        assert os.environ[compute_device.BUFFER_VARIABLE] == "200"
