"""Health checks: what must be finite, what must move, and how far."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import pytest

from stages.tuner import checkpoint
from stages.tuner import step as tuner_step
from stages.tuner.config import EmaConfig, OptimizerConfig, ScheduleConfig
from stages.tuner.optimizers import step as optimizer_step
from tests.stages.text_to_image.train.runs import BASE, Run

Grads = dict[str, mx.array]


AT_ONCE = ScheduleConfig(warmup_steps=0)


def altered(monkeypatch: pytest.MonkeyPatch, change: Callable[[int, mx.array, Grads], tuple[mx.array, Grads]]) -> None:
    """Change what a gradient's call, the first being 1, gives."""
    real, calls = tuner_step.loss_and_grads, iter(range(1, 1000))
    monkeypatch.setattr(tuner_step, "loss_and_grads", lambda *given: change(next(calls), *real(*given)))


def test_a_loss_that_is_not_finite_is_no_update_though_its_gradient_is_finite(transformer, tmp_path, monkeypatch):
    def change(call: int, losses_B: mx.array, grads: Grads) -> tuple[mx.array, Grads]:
        one = mx.arange(losses_B.size) == 0  # of the samples one alone
        return mx.where(one, {2: math.inf, 3: math.nan}[call], losses_B) if call in (2, 3) else losses_B, grads

    altered(monkeypatch, change)
    run = Run(tmp_path, transformer, replace(BASE, steps=4, checkpoint_every=1, keep_states=4)).go()
    saved = {found.step: found for found in checkpoint.find_checkpoints(tmp_path / "artifacts")}
    for name in (checkpoint.ADAPTER, checkpoint.OPTIMIZER):
        before, *after, later = (saved[step].arrays(name) for step in (1, 2, 3, 4))
        assert all(mx.array_equal(before[key], each[key]) for each in after for key in before)
        assert not all(mx.array_equal(before[key], later[key]) for key in before)
    assert [line for line in run.said if "not finite" in line] == [
        f"step {step}: the loss or the gradient is not finite; the step is skipped" for step in (2, 3)
    ]


@pytest.mark.parametrize(
    ("variant", "dead", "said"),
    [
        ("lora", ("transformer_blocks.0.attn.to_k.",), "transformer_blocks.0.attn.to_k has not moved; no"),
        (
            "lokr",
            ("transformer_blocks.0.attn.to_k.", "single_"),
            "attn.to_k has not moved, nor have 2 other",
        ),
    ],
)
def test_linears_that_no_gradient_reaches_are_reported_once_with_the_name_of_the_first(
    variant, dead, said, transformer, tmp_path, monkeypatch
):
    altered(
        monkeypatch,
        lambda call, losses_B, grads: (losses_B, {n: g * 0 if n.startswith(dead) else g for n, g in grads.items()}),
    )
    factor = 4 if variant == "lokr" else None
    run = Run(tmp_path, transformer, replace(BASE, steps=12, batch_size=1, variant=variant, factor=factor)).go()
    lines = [line for line in run.said if "has not moved" in line]
    assert len(lines) == 1 and lines[0].startswith("step 10: ")
    assert said in lines[0]


@pytest.mark.parametrize(
    ("lr", "said"), [(5.0, r"step 1: the update .* lower \[train\] lr \(5\)"), (1e-10, r".*raise \[train\] lr")]
)
def test_an_update_as_long_as_the_adapter_or_lost_in_rounding_is_reported(lr, said, transformer, tmp_path):
    run = Run(tmp_path, transformer, replace(BASE, steps=10, lr=lr, schedule=AT_ONCE, batch_size=1)).go()
    assert any(re.match(said, line) for line in run.said)


def test_three_steps_in_a_row_that_are_not_finite_end_the_run_also_across_a_resume(transformer, tmp_path, monkeypatch):
    def change(call: int, losses_B: mx.array, grads: Grads) -> tuple[mx.array, Grads]:
        factor = math.nan if call in (2, 3, 4) else 1.0
        return losses_B * factor, {name: grad * factor for name, grad in grads.items()}

    altered(monkeypatch, change)
    run = Run(tmp_path, transformer, replace(BASE, checkpoint_every=1)).go(stop_at=3)
    with pytest.raises(ValueError, match=r"^train: stopped at step 4: 3 steps in a row .* lower \[train\] lr \(0.01\)"):
        run.go()
    assert checkpoint.find_checkpoints(tmp_path / "artifacts")[0].step == 3


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "adafactor", "lion", "prodigy"])
def test_an_update_that_is_not_finite_ends_the_run_at_once_and_reaches_no_file(kind, transformer, tmp_path, monkeypatch):
    # The losses and gradients stay finite. Decay makes the adapter 10^4 times as long in a step, once Prodigy's rate has grown.
    altered(monkeypatch, lambda call, losses_B, grads: (mx.ones_like(losses_B), {n: mx.ones_like(g) for n, g in grads.items()}))
    more = {"d_coef": 1e6} if kind == "prodigy" else {}
    method = OptimizerConfig(kind=kind, weight_decay=100.0, **more)
    config = replace(BASE, optimizer=method, schedule=AT_ONCE, lr=100.0, steps=5, checkpoint_every=1, ema=EmaConfig())
    run = Run(tmp_path, transformer, config).go(stop_at=4)
    assert checkpoint.find_checkpoints(tmp_path / "artifacts")[0].step == 4
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"^train: stopped at step 5: the update made .* infinite, .*; lower \[train\] lr"):
        run.go()  # its fifth step, the last, would be the result
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_an_adapter_that_does_not_move_ends_the_run(transformer, tmp_path, monkeypatch):
    monkeypatch.setattr(optimizer_step, "clip_factor", lambda norm, limit: mx.zeros(()))
    with pytest.raises(ValueError, match="stopped at step 10: the adapter has not moved"):
        Run(tmp_path, transformer, replace(BASE, steps=12, batch_size=1)).go()
