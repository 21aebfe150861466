"""The memory plan: how a run computes its steps within the memory that it may take, chosen before a weight is loaded.

A plan is the number of last blocks that keep their activations until the backward pass, which computes the others
again. "whole": all blocks. "blocks": one, because the backward pass begins with the last block anyway. Plans agree up
to rounding, so the plan is no part of the recipe. A resumed run keeps the plan of its checkpoint, to end with the same
bits, unless it no longer fits.
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
    plan: Plan
    max_tokens: int | None  # of a micro-batch; None: no limit
    limit: int  # bytes that training may take
    live_bytes: int  # bytes in use from which MLX starts no further operation
    max_samples: int | None = None  # of a micro-batch; None: no limit


@dataclass(frozen=True)
class Candidate:
    samples: int  # of a micro-batch
    plan: Plan
    estimate: Estimate  # of a micro-batch of so many samples

    @property
    def needs(self) -> int:
        return self.estimate.peak(self.plan)


def best_candidate(
    config: TrainingConfig,
    batch_size: int,
    estimate: Callable[[int], Estimate],  # of a micro-batch of so many samples
    limit: int,  # bytes
    begun: Plan | None = None,  # of the run that is resumed
) -> Candidate:
    """Samples at once and plan for the largest batch, by [train] `micro_batch` and `memory`. May need more than `limit`."""
    samples = min(config.micro_batch, batch_size) if isinstance(config.micro_batch, int) else batch_size
    # Micro-batches are halved only until the thriftiest plan fits: the plan then spends what is left.
    if config.micro_batch == "auto":
        while samples > 1 and estimate(samples).peak("blocks") > limit:
            samples = (samples + 1) // 2
    found = estimate(samples)
    if config.memory != "auto":
        blocks = found.blocks
        return Candidate(samples, min(config.memory, blocks) if isinstance(config.memory, int) else config.memory, found)
    # A resumed run keeps its plan, to end with the same bits.
    return Candidate(samples, begun if begun and found.peak(begun) <= limit else fastest_plan(found, limit), found)


def fastest_plan(estimate: Estimate, limit: int) -> Plan:
    """The plan with the most kept blocks that needs at most `limit` bytes; "blocks" even if that needs more."""
    blocks = estimate.blocks
    fits = [n for n in range(1, blocks + 1) if estimate.peak(n) <= limit]
    # Computing blocks twice costs time, so the fastest plan is the one that keeps most.
    return "blocks" if not fits or fits[-1] == 1 else "whole" if fits[-1] == blocks else fits[-1]


def live_bytes_limit(estimate: Estimate, plan: Plan, limit: int) -> int:
    """Bytes in use from which MLX must wait before it starts further operations, so that a run stays below `limit`."""
    # Unpacked weights are not work ahead: they are freed within a block.
    ahead = round(AHEAD * estimate.block_work) - estimate.unpacked_work
    # Operations already started when the limit is reached still take memory.
    most = limit - round(LAST * estimate.block_work)
    return most if plan == "whole" else min(most, estimate.peak(plan) + ahead)


def plan_run(
    config: TrainingConfig, candidate: Candidate, tokens: int, limit: int, start: Checkpoint | None, say: Callable[[str], None]
) -> MemoryPlan:
    """The plan of a run, told to the user. `tokens`: of a sample of the largest batch."""
    state = start.state if start else {}
    begun, plan = state.get("plan"), candidate.plan
    if begun not in (None, plan):
        say(f"the run began with plan {begun} and goes on with plan {plan}: the same gradients up to rounding, not to the bit")
    blocks = candidate.estimate.blocks
    say(f"plan {describe_plan(plan, blocks)}: estimated peak {candidate.needs / GB:.2g} GB of {limit / GB:.3g} GB")
    if config.micro_batch != "auto":
        return MemoryPlan(plan, None, limit, live_bytes_limit(candidate.estimate, plan, limit), config.micro_batch)
    # "auto" starts from the checkpoint's size: the micro-batch decides the last bits.
    return MemoryPlan(plan, saved_max_tokens(state) or candidate.samples * tokens, limit, limit)


def saved_max_tokens(state: Any) -> int | None:
    found: int | None = state.get("max_tokens", state.get("piece"))  # "piece": its name until 0.1
    return found


def adjust_max_tokens(max_tokens: int, used: int, held: int, peak: int, limit: int) -> int:
    """Tokens of the next step's micro-batches, from the last step's: bytes held between steps, peak bytes, tokens used."""
    if peak > limit:
        return max(1, used // 2)
    fits_twice = held + 2 * (peak - held) <= GROWTH_LIMIT * limit
    return 2 * used if fits_twice and max_tokens < 2 * used else max_tokens


def describe_plan(plan: Plan, blocks: int) -> str:
    return plan if isinstance(plan, str) else f"{plan} (the last {plan} of {blocks} blocks are not computed twice)"


# What to change if no plan fits


@dataclass(frozen=True)
class Remedy:
    settings: dict[str, Any]  # of [train], to change
    plan: Plan
    needs: int  # bytes, estimated

    def __str__(self) -> str:
        own = [f"{name} = {json.dumps(value)}" for name, value in self.settings.items() if name != "optimizer"]
        parts = ["[train] " + ", ".join(own)] if own else []
        if method := self.settings.get("optimizer"):
            parts.append(f'[train.optimizer] kind = "{method.kind}"')
        return "; ".join(parts)


def cheaper_settings(config: TrainingConfig, samples: int) -> Iterator[dict[str, Any]]:
    """Changes that save memory, each on top of those before: first what costs time, then what costs quality."""
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
    """The fewest of `cheaper_settings`, then `last`, with which the run fits; all of them if none suffice."""

    def remedy_with(settings: dict[str, Any]) -> Remedy:
        chosen = candidate(replace(config, **settings))
        return Remedy(settings, chosen.plan, chosen.needs)

    remedy = remedy_with({})
    for change in (*cheaper_settings(config, samples), *({name: value} for name, value in last.items())):
        if remedy.needs > limit:
            remedy = remedy_with(remedy.settings | change)
    if remedy.needs > limit:
        return remedy
    # Undo what later changes made unnecessary, the costliest first.
    for name in reversed(remedy.settings):
        without = remedy_with({other: value for other, value in remedy.settings.items() if other != name})
        remedy = without if without.needs <= limit else remedy
    return remedy
