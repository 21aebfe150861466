"""Memory: what the device has, what a plan will take, which plan fits, and what was used. Measured, not guessed.

What a step needs is found by trying one block of each kind on the largest batch, before the first step: its visit (the
block computed again and differentiated by itself) and what it keeps (its activations, where it is not computed again).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import mlx.core as mx
from mlx.utils import tree_flatten

from stages.tuner.backprop import Arrays, Chain, Plan, Tree, Walk, kept_blocks, vjp

Item = TypeVar("Item")

GB = 1e9
HEADROOM = 0.15  # of the device's memory: for the system, MLX's cache and what is being copied


def device_bytes() -> int:
    """Memory that the device may use: what Metal recommends, a GPU's own, or the machine's."""
    info: Mapping[str, Any] = mx.device_info()
    for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if key in info:
            return int(info[key])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def budget(limit_gb: float | None = None) -> int:
    """Bytes that training may take: the setting, or the device's memory less headroom."""
    return int(limit_gb * GB if limit_gb else device_bytes() * (1 - HEADROOM))


@dataclass(frozen=True)
class Footprint:
    """What one batch takes, bytes. `held` lies there anyway: weights, adapters, the optimizer's state."""

    held: int
    stream: int  # one block's input
    kinds: tuple[str, ...]  # of the blocks, in order
    grads: Mapping[str, int]  # by kind: one block's gradients
    visit: Mapping[str, int]  # by kind: what computing and differentiating one block takes beside its input
    kept: Mapping[str, int]  # by kind: what of it stays where the block is not computed again

    def need(self, plan: Plan) -> int:
        """Bytes at the peak of a step: in the tail's backward pass, or in a visit before it.

        On the way back inputs are let go while gradients gather, so both are counted visit by visit.
        """
        head = len(self.kinds) - kept_blocks(plan, len(self.kinds))
        last = self.kinds[head:]
        found = sum(self.grads[kind] for kind in last)
        work = sum(self.kept[kind] for kind in last) + max(self.visit[kind] - self.kept[kind] for kind in last)
        most = head * self.stream + found + work
        for n in reversed(range(head)):
            kind = self.kinds[n]
            most = max(most, (n + 1) * self.stream + found + self.stream + self.visit[kind])  # + its output's gradient
            found += self.grads[kind]
        return self.held + most

    def plan(self, limit: int) -> Plan:
        """The fastest plan that needs at most `limit` bytes: whole, or as many kept blocks as fit. ValueError if none does."""
        fits = [n for n in range(1, len(self.kinds) + 1) if self.need(n) <= limit]
        if not fits:
            work = self.need("blocks") - self.held
            share = (limit - self.held) / work
            smaller = f"batches of {share:.0%} of these pixels would fit" if share > 0.05 else "the weights alone fill it"
            raise ValueError(
                f"a training step needs {self.need('blocks') / GB:.1f} GB and may take {limit / GB:.1f} GB: {smaller}; "
                "lower the resolution or batch_size, or pack the base ([train] base_bits = 8 or 4)"
            )
        return "whole" if fits[-1] == len(self.kinds) else "blocks" if fits[-1] == 1 else fits[-1]


def footprint(chain: Chain, adapters: Arrays, scales: Mapping[str, float], inputs: Mapping[str, Any]) -> Footprint:
    """Try one block of each kind on `inputs`, the largest batch that will come. What is compiled for it is used later."""
    held = mx.get_active_memory()
    h, shared = chain.enter(**inputs)
    mx.eval(h, shared)
    walk = Walk(chain, adapters, scales)
    kinds = tuple(block.kind for block in chain.blocks)
    visit = {kind: _visit(walk, kinds.index(kind), h, shared) for kind in set(kinds)}
    kept = {kind: _kept(walk, kinds.index(kind), h, shared) for kind in set(kinds)}
    grads = {kind: _nbytes(walk.adapters[kinds.index(kind)]) for kind in set(kinds)}
    return Footprint(held, _nbytes(h), kinds, grads, visit, kept)


def _visit(walk: Walk, n: int, h: Tree, shared: Tree) -> int:
    before = mx.get_active_memory()
    limit = mx.set_memory_limit(before)  # nothing is dispatched ahead: what is live is what is needed
    mx.reset_peak_memory()
    mx.eval(walk.backward(n, h, shared, h))
    mx.set_memory_limit(limit)
    return mx.get_peak_memory() - before


def _kept(walk: Walk, n: int, h: Tree, shared: Tree) -> int:
    """With the gradient asked for but not computed, a block's output leaves behind what the gradient will need."""
    before = mx.get_active_memory()
    out, grads = vjp(lambda h, adapters: walk.plainly(n, adapters, h, shared), h, walk.adapters[n], h)
    mx.eval(out)
    kept = mx.get_active_memory() - before
    del grads
    return kept


def _nbytes(tree: Tree) -> int:
    return sum(leaf.nbytes for _, leaf in tree_flatten(tree))


@dataclass
class Meter:
    """Memory by phase, a row for each: active before and after, the peak within, MLX's cache; bytes."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what runs inside. MLX's own peak starts again; `peak` has the largest of all."""
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        yield
        sizes = {"active": mx.get_active_memory(), "peak": mx.get_peak_memory(), "cache": mx.get_cache_memory()}
        self.rows.append({"step": self.step, "phase": name, "before": before, **sizes})

    def over(self, items: Iterable[Item], name: str) -> Iterator[Item]:
        """The same items, the making of each measured as one phase of one step: any stage's `run` can go through it."""
        each = iter(items)
        while True:
            with self.phase(name):
                item = next(each, each)
            if item is each:
                self.rows.pop()  # the end is no item
                return
            self.step += 1
            yield item  # type: ignore[misc]

    @property
    def peak(self) -> int:
        """The largest peak of any phase, bytes."""
        return max((row["peak"] for row in self.rows), default=0)

    def leaks(self, least: int = 1 << 20) -> dict[str, int]:
        """Phases that leave at least `least` bytes behind every time: bytes a time, by phase.

        What one phase adds and a later one lets go is no leak: what is let go counts against what was added last.
        """
        added: list[list[Any]] = []  # [phase, which time, bytes that are still there]
        times: Counter[str] = Counter()
        for row in self.rows:
            change, name = row["active"] - row["before"], row["phase"]
            if change > 0:
                added.append([name, times[name], change])
            while change < 0 and added:
                gone = min(-change, added[-1][2])
                change, added[-1][2] = change + gone, added[-1][2] - gone
                if not added[-1][2]:
                    added.pop()
            times[name] += 1
        found = {}
        for name, count in times.items():
            # The first time may fill caches of its own; what the last one left may be let go yet.
            left = {n: size for phase, n, size in added if phase == name and size >= least and 0 < n < count - 1}
            if count >= 5 and len(left) == count - 2:
                found[name] = sum(left.values()) // len(left)
        return found
