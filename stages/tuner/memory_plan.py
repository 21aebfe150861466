"""The memory plan: how a run computes its steps within the memory that it may take, chosen before a weight is loaded.

Every plan gives the same gradient up to rounding, so the plan is no part of the recipe. Every checkpoint records the plan, and a
resumed run keeps it in order to end with the same bits. Only a changed setting or too little memory changes the plan.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

from stages.tuner.blockwise.backprop import Plan
from stages.tuner.blockwise.planner import Estimate
from stages.tuner.checkpoint import Checkpoint
from stages.tuner.config import TrainingConfig
from stages.tuner.quantize import BITS

C = TypeVar("C", bound=TrainingConfig)

GB = 1e9
GROWTH_LIMIT = 0.9  # share of the limit that a micro-batch twice as large must stay below
AHEAD = 0.5  # share of one block's working memory that work started ahead may use beyond the estimate
LAST = 0.25  # share of one block's working memory that the operations started last may add


@dataclass(frozen=True)
class MemoryPlan:
    """How a run computes its steps within the memory that it may take. `plan` says how many of the last blocks (layers)
    keep their activations until the backward pass: a number, "whole" for all blocks, or "blocks" for only the last
    block. `max_tokens` and `max_samples` limit the tokens and the samples of a micro-batch (samples computed at once).
    None means no limit. `limit` is the memory that training may take, in bytes. While `live_bytes` bytes or more are in
    use, MLX starts no further operation.

    Blocks that keep no activations are computed twice. The backward pass computes them again, block by block. The plan
    "blocks" is named after this. The last block needs no second computation, because the backward pass begins with it.
    """

    plan: Plan
    max_tokens: int | None
    limit: int
    live_bytes: int
    max_samples: int | None = None


@dataclass(frozen=True)
class Candidate:
    """A choice of how a run computes its largest batch, and the memory that this needs. The batch is computed in
    micro-batches, one after another. `samples` is the number of samples in a micro-batch. `plan` says how many of the
    last blocks (layers) keep their activations until the backward pass: a number, "whole" for all blocks, or "blocks"
    for only the last block. `estimate` is the memory estimate of a micro-batch with this number of samples.

    The backward pass computes the activations of the other blocks again, block by block. The plan "blocks" is named
    after this.
    """

    samples: int
    plan: Plan
    estimate: Estimate

    @property
    def needs(self) -> int:
        """The estimated peak memory of this candidate, in bytes."""
        return self.estimate.peak(self.plan)


def best_candidate(
    config: TrainingConfig,
    batch_size: int,
    estimate: Callable[[int], Estimate],
    limit: int,
    begun: Plan | None = None,
) -> Candidate:
    """Choose how many samples of the largest batch to compute at once, and with which memory plan. Return both as a
    `Candidate`. `config` holds the settings [train], which may fix both. `batch_size` is the number of samples of the batch.
    `estimate(samples)` returns the memory estimate for so many samples. `limit` is the memory limit in bytes. `begun` is the
    plan of a resumed run, or None. If no choice fits, the result needs more than `limit`.

    A memory plan says how many of the last blocks keep their activations: "whole" (all), "blocks" (one) or a number.

    The settings `micro_batch` and `memory` of `config` decide. `micro_batch` is the number of samples computed at once. None
    means the whole batch. "auto" halves the batch until it fits with the plan "blocks". `memory` is the plan. "auto" means the
    plan `begun` if it fits, otherwise the fastest plan that fits. If none fits, "auto" chooses what needs least memory. Numbers
    and plans in the settings are always obeyed.
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
    """Return the fastest memory plan that needs at most `limit` bytes. A memory plan says how many of the last blocks
    (layers) keep their activations until the backward pass. If at most one block fits, the result is "blocks", which
    means only the last block. Otherwise, the result is the largest number of blocks that fits, or "whole" if all blocks
    fit. `estimate` is the memory estimate of a micro-batch (samples computed at once).

    The backward pass computes the activations of the other blocks again, block by block. The plan "blocks" is named
    after this. Computing blocks twice takes longer but needs less memory. So the plan with the largest number of blocks
    is the fastest. The result is "blocks" even if this plan needs more than `limit` bytes.
    """
    blocks = estimate.blocks
    fits = [n for n in range(1, blocks + 1) if estimate.peak(n) <= limit]
    return "blocks" if not fits or fits[-1] == 1 else "whole" if fits[-1] == blocks else fits[-1]


def live_bytes_limit(estimate: Estimate, plan: Plan, limit: int) -> int:
    """Return the memory use, in bytes, at which MLX must wait before it starts further work. `estimate` is the memory
    estimate of the largest micro-batch (samples computed at once). `plan` says how many of the last blocks keep their
    activations: "whole", "blocks" or a number. `limit` is the number of bytes that training may take. The result is a
    little below `limit`, because the operations started last take memory too.

    Unpacked weights are not part of the allowance for working ahead, because they are freed within a block.
    """
    ahead = round(AHEAD * estimate.block_work) - estimate.unpacked_work
    most = limit - round(LAST * estimate.block_work)
    return most if plan == "whole" else min(most, estimate.peak(plan) + ahead)


def plan_run(
    config: TrainingConfig, candidate: Candidate, tokens: int, limit: int, start: Checkpoint | None, say: Callable[[str], None]
) -> MemoryPlan:
    """Return the `MemoryPlan` of a run. `config` holds the settings [train]. `candidate` is the choice that
    `best_candidate` made for the largest batch: how many samples are computed at once (a micro-batch), and how many
    blocks (layers) keep their activations. `tokens` is the number of tokens per sample in the largest batch. `limit` is
    the memory that training may take, in bytes. `start` is the checkpoint to continue from, or None for a new run.
    `say` is called with each line for the user.

    The result has the field `plan` of `candidate`, and limits for micro-batches and memory. The lines for the user tell
    the plan and its estimated peak memory. If `micro_batch` is "auto", a continued run keeps the largest micro-batch
    size of its checkpoint. If the plan of a continued run changes, the user is told.
    """
    state = start.state if start else {}
    begun, plan = state.get("plan"), candidate.plan
    if begun not in (None, plan):
        say(f"the run began with plan {begun} and goes on with plan {plan}: the same gradients up to rounding, not to the bit")
    blocks = candidate.estimate.blocks
    say(f"plan {describe_plan(plan, blocks)}: estimated peak {candidate.needs / GB:.2g} GB of {limit / GB:.3g} GB")
    if config.micro_batch != "auto":
        return MemoryPlan(plan, None, limit, live_bytes_limit(candidate.estimate, plan, limit), config.micro_batch)
    return MemoryPlan(plan, saved_max_tokens(state) or candidate.samples * tokens, limit, limit)


def saved_max_tokens(state: Any) -> int | None:
    """Return the most tokens that a micro-batch (samples computed at once) may have, as recorded in a checkpoint.
    `state` is the content of the checkpoint's `state.json`. The result is None if no such limit is recorded.
    """
    found: int | None = state.get("max_tokens", state.get("piece"))  # "piece": its name until 0.1
    return found


def adjust_max_tokens(max_tokens: int, used: int, held: int, peak: int, limit: int) -> int:
    """Return the most tokens that a micro-batch (samples computed at once) may have in the next step. `max_tokens` is
    the most tokens that a micro-batch was allowed in the last step. `used` is the number of tokens in the largest
    micro-batch of the last step. `held` is the memory in use between steps, in bytes. `peak` is the largest memory in
    use during the last step, in bytes. `limit` is the memory that training may use, in bytes.

    If `peak` is above `limit`, the result is half of `used`, but at least 1. If twice `used` needs at most 90 % of
    `limit`, the result is the larger of `max_tokens` and twice `used`. Otherwise, the result is `max_tokens`.
    """
    if peak > limit:
        return max(1, used // 2)
    fits_twice = held + 2 * (peak - held) <= GROWTH_LIMIT * limit
    return 2 * used if fits_twice and max_tokens < 2 * used else max_tokens


def describe_plan(plan: Plan, blocks: int) -> str:
    """Return a memory plan as text for the user. `plan` is "whole", "blocks", or how many of the last blocks keep their
    activations. A number is explained, such as "4 (the last 4 of 20 blocks are not computed twice)". `blocks` is the
    number of all blocks.
    """
    return plan if isinstance(plan, str) else f"{plan} (the last {plan} of {blocks} blocks are not computed twice)"


# What to change if no plan fits


@dataclass(frozen=True)
class Remedy:
    """A suggestion for training that does not fit in memory. `settings` are the settings of [train] to change (name -> new
    value). `plan` is the plan of a run with these settings. `needs` is its estimated peak memory in bytes.
    """

    settings: dict[str, Any]
    plan: Plan
    needs: int

    def __str__(self) -> str:
        """Return the settings as they are written in project.toml, such as "[train] micro_batch = 1, base_bits = 8"."""
        own = [f"{name} = {json.dumps(value)}" for name, value in self.settings.items() if name != "optimizer"]
        parts = ["[train] " + ", ".join(own)] if own else []
        if method := self.settings.get("optimizer"):
            parts.append(f'[train.optimizer] kind = "{method.kind}"')
        return "; ".join(parts)


def cheaper_settings(config: TrainingConfig, samples: int) -> Iterator[dict[str, Any]]:
    """Yield changes to the settings [train] that reduce memory, each as {name: new value}. `config` holds the present
    settings. The changes add up: each one is made on top of the earlier ones. Changes that only cost time come first.
    Changes that cost quality follow. `samples` is the number of samples of the largest batch. Smaller micro-batches are
    suggested only if it is more than one.
    """
    if config.memory not in ("auto", "blocks"):
        yield {"memory": "blocks"}
    if config.micro_batch != "auto" and min(config.micro_batch or samples, samples) > 1:
        yield {"micro_batch": 1}
    yield from ({"base_bits": bits} for bits in BITS if bits < config.base_bits)
    if config.optimizer.kind == "adamw":  # adamw8bit needs another learning rate than any other optimizer
        yield {"optimizer": replace(config.optimizer, kind="adamw8bit")}


def cheapest_remedy(
    config: C, samples: int, candidate: Callable[[C], Candidate], limit: int, last: Mapping[str, Any] = MappingProxyType({})
) -> Remedy:
    """Find changes to the settings with which a run fits into memory, and return them as a `Remedy`. `config` holds the
    present settings [train]. `samples` is the number of samples of the largest batch. `candidate(settings)` returns the
    plan and the memory estimate of a run with these settings. `limit` is the memory limit in bytes. `last` maps
    settings to new values that are tried after all other changes. If all changes together do not suffice, the result
    contains all of them.

    The changes from `cheaper_settings` are made one after another until the run fits. Then every change that proves
    unnecessary is undone.
    """

    def remedy_with(settings: dict[str, Any]) -> Remedy:
        chosen = candidate(replace(config, **settings))
        return Remedy(settings, chosen.plan, chosen.needs)

    remedy = remedy_with({})
    for change in (*cheaper_settings(config, samples), *({name: value} for name, value in last.items())):
        if remedy.needs > limit:
            remedy = remedy_with(remedy.settings | change)
    if remedy.needs > limit:
        return remedy
    for name in reversed(remedy.settings):
        without = remedy_with({other: value for other, value in remedy.settings.items() if other != name})
        remedy = without if without.needs <= limit else remedy
    return remedy
