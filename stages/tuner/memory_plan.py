"""The memory plan: how a run computes its steps within the memory that it may take, chosen before a weight is loaded.

Every plan gives the same gradient up to rounding, so the plan is no part of the recipe. A run keeps the plan that it began with,
which every checkpoint records, so that a resumed run ends with the same bits; only a setting or less memory changes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from stages.tuner.blockwise.backprop import Plan
from stages.tuner.blockwise.planner import Estimate
from stages.tuner.checkpoint import Checkpoint
from stages.tuner.config import TrainingConfig
from stages.tuner.quantize import BITS

C = TypeVar("C", bound=TrainingConfig)

GB = 1e9
GROWTH_LIMIT = 0.9  # share of the limit that a micro-batch twice as large must stay below
AHEAD = 0.5  # share of one block's working memory that may be live beyond the estimate, for work dispatched ahead


@dataclass(frozen=True)
class MemoryPlan:
    """How a run computes its steps. `plan`: which blocks are differentiated as one graph. `max_tokens`: tokens per micro-batch,
    if micro_batch = "auto". `limit`: bytes that training may take. `live_bytes`: bytes that may be live before the next block
    waits for the device.
    """

    plan: Plan
    max_tokens: int | None
    limit: int
    live_bytes: int


@dataclass(frozen=True)
class Candidate:
    """A way to compute the largest batch: samples per micro-batch, the plan, and the estimate of the bytes."""

    samples: int
    plan: Plan
    estimate: Estimate

    @property
    def needs(self) -> int:
        """The estimated peak memory, bytes."""
        return self.estimate.peak(self.plan)


def best_candidate(
    config: TrainingConfig,
    batch_size: int,
    estimate: Callable[[int], Estimate],
    limit: int,
    begun: Plan | None = None,
) -> Candidate:
    """Choose the samples per micro-batch and the plan: as the settings say, else the fastest that needs at most `limit` bytes.
    `estimate(samples)` estimates the bytes of so many samples of the largest batch, which has `batch_size`. `begun` is the plan
    that a resumed run began with; it is kept if it fits. If nothing fits, the candidate that needs least is returned.
    """
    samples = min(config.micro_batch, batch_size) if isinstance(config.micro_batch, int) else batch_size
    if config.micro_batch == "auto":
        while samples > 1 and estimate(samples).peak("blocks") > limit:
            samples = (samples + 1) // 2
    found = estimate(samples)
    if config.memory != "auto":
        blocks = found.blocks
        return Candidate(samples, min(config.memory, blocks) if isinstance(config.memory, int) else config.memory, found)
    return Candidate(samples, begun if begun and found.peak(begun) <= limit else fastest_plan(found, limit), found)


def fastest_plan(estimate: Estimate, limit: int) -> Plan:
    """Return the plan that keeps the activations of most blocks within `limit` bytes; "blocks" if no plan fits."""
    blocks = estimate.blocks
    fits = [n for n in range(1, blocks + 1) if estimate.peak(n) <= limit]
    return "blocks" if not fits or fits[-1] == 1 else "whole" if fits[-1] == blocks else fits[-1]


def live_bytes_limit(estimate: Estimate, plan: Plan, limit: int) -> int:
    """Return how many bytes may be live before the next block waits for the device. `estimate` is that of the largest micro-
    batch, `limit` the bytes that training may take. Unpacked weights are not part of the allowance for working ahead: they live
    within one block.
    """
    ahead = round(AHEAD * estimate.block_work) - estimate.unpacked_work
    return limit if plan == "whole" else min(limit, estimate.peak(plan) + ahead)


def plan_run(
    config: TrainingConfig, candidate: Candidate, tokens: int, limit: int, start: Checkpoint | None, say: Callable[[str], None]
) -> MemoryPlan:
    """Make the memory plan of a run from the candidate that was chosen, and print it. `tokens` are those of one sample of the
    largest batch. `start` is the checkpoint that the run goes on from: its micro-batch size is kept, and a change of its plan is
    reported.
    """
    state = start.state if start else {}
    begun, plan = state.get("plan"), candidate.plan
    if begun not in (None, plan):
        say(f"the run began with plan {begun} and goes on with plan {plan}: the same gradients up to rounding, not to the bit")
    blocks = candidate.estimate.blocks
    say(f"plan {describe_plan(plan, blocks)}: estimated peak {candidate.needs / GB:.2g} GB of {limit / GB:.3g} GB")
    if config.micro_batch != "auto":
        return MemoryPlan(plan, None, limit, live_bytes_limit(candidate.estimate, plan, limit))
    return MemoryPlan(plan, saved_max_tokens(state) or candidate.samples * tokens, limit, limit)


def saved_max_tokens(state: Any) -> int | None:
    """Read the tokens per micro-batch from the state of a checkpoint; None if the run had no such limit."""
    found: int | None = state.get("max_tokens", state.get("piece"))  # "piece": its name until 0.1
    return found


def adjust_max_tokens(max_tokens: int, used: int, held: int, peak: int, limit: int) -> int:
    """Return the tokens per micro-batch of the next step: fewer after a peak above the limit, twice as many if they surely fit.
    `used` are the tokens of the step's largest micro-batch, `held` the bytes held between steps, `peak` the bytes at the peak of
    the step, `limit` the bytes that training may take.
    """
    if peak > limit:
        return max(1, used // 2)
    fits_twice = held + 2 * (peak - held) <= GROWTH_LIMIT * limit
    return 2 * used if fits_twice and max_tokens < 2 * used else max_tokens


def describe_plan(plan: Plan, blocks: int) -> str:
    """Describe a plan of a model with so many blocks, for the user."""
    return plan if isinstance(plan, str) else f"{plan} (the last {plan} of {blocks} blocks are not computed twice)"


# What to change where nothing fits


@dataclass(frozen=True)
class Remedy:
    """Settings of [train] to change, and the plan and bytes at the peak that a run with them has."""

    settings: dict[str, Any]
    plan: Plan
    needs: int

    def __str__(self) -> str:
        """The settings as they are written in project.toml: "[train] micro_batch = 1; [train.optimizer] kind = ..."."""
        own = [f"{name} = {json.dumps(value)}" for name, value in self.settings.items() if name != "optimizer"]
        parts = ["[train] " + ", ".join(own)] if own else []
        if method := self.settings.get("optimizer"):
            parts.append(f'[train.optimizer] kind = "{method.kind}"')
        return "; ".join(parts)


def cheaper_settings(config: TrainingConfig, samples: int) -> Iterator[dict[str, Any]]:
    """Yield changes of settings that need less memory, to be made one after another: first those that cost time, then quality.
    `samples` is the number of samples of the largest batch, trained or measured, that a micro-batch could divide.
    """
    if config.memory not in ("auto", "blocks"):
        yield {"memory": "blocks"}
    if config.micro_batch != "auto" and min(config.micro_batch or samples, samples) > 1:
        yield {"micro_batch": 1}
    yield from ({"base_bits": bits} for bits in BITS if bits < config.base_bits)
    if config.optimizer.kind == "adamw":  # adamw8bit needs another learning rate than any other optimizer
        yield {"optimizer": replace(config.optimizer, kind="adamw8bit")}


def cheapest_remedy(config: C, samples: int, candidate: Callable[[C], Candidate], limit: int) -> Remedy:
    """Find the fewest settings to change so that the run needs at most `limit` bytes; all of them if it never does.
    `candidate(config)` estimates the run with other settings; `samples` as in `cheaper_settings`.
    """

    def tried(settings: dict[str, Any]) -> Remedy:
        found = candidate(replace(config, **settings))
        return Remedy(settings, found.plan, found.needs)

    remedy = tried({})
    for change in cheaper_settings(config, samples):
        if remedy.needs > limit:
            remedy = tried(remedy.settings | change)
    if remedy.needs > limit:
        return remedy
    for name in reversed(remedy.settings):
        without = tried({other: value for other, value in remedy.settings.items() if other != name})
        remedy = without if without.needs <= limit else remedy
    return remedy
