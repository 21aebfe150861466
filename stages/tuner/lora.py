"""Low-rank adapters: y = x W^T + scale (x A^T) B^T, with A (rank, in) and B (out, rank). Hu et al. 2021, arXiv 2106.09685.

An adapter is a flat dict of float32 masters, "<linear>.lora_A.weight" and "<linear>.lora_B.weight". B starts at zero, so
that the first step sees the base model exactly.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import mlx.core as mx
import numpy as np

from stages.tuner import draws, quantize

Arrays = dict[str, mx.array]
Linear = Callable[[str, Any, mx.array], mx.array]  # (name within the block, weight, x) -> y

A, B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class Target:
    """One Linear that gets an adapter: its name, its weight's shape (out, in), and the adapter's size."""

    name: str
    outputs: int
    inputs: int
    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        """What the adapter's output is multiplied by."""
        return self.alpha / self.rank


def choose(
    linears: Mapping[str, tuple[int, int]], patterns: Iterable[str], rank: int, alpha: float | None = None
) -> list[Target]:
    """The Linears that any pattern names, in the model's order; alpha is the rank where none is given.

    A pattern has shell wildcards and names a Linear from its first part on, or from any later part: "*" is all,
    "attn.to_q" that of every block, "single_transformer_blocks.*" every Linear of those blocks. ValueError for a
    pattern that names nothing.
    """
    wanted = list(patterns)
    if not wanted:
        raise ValueError('there is no target: give patterns of Linears, or ["*"] for every one of the blocks')
    for pattern in wanted:
        if not any(matches(name, pattern) for name in linears):
            raise ValueError(f"the target {pattern!r} matches no Linear of the blocks{nearest(pattern, linears)}")
    found = {name: shape for name, shape in linears.items() if any(matches(name, p) for p in wanted)}
    return [Target(name, out, into, rank, float(rank if alpha is None else alpha)) for name, (out, into) in found.items()]


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern names a Linear."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def nearest(pattern: str, names: Iterable[str]) -> str:
    """`; near it: a, b`: what of the model's names, from any part on and without block numbers, looks like the pattern."""
    tails: dict[str, None] = {}
    for name in names:
        parts = ["*" if part.isdigit() and at == 1 else part for at, part in enumerate(name.split("."))]
        tails |= {".".join(parts[start:]): None for start in range(len(parts)) if parts[start] != "*"}
    close = difflib.get_close_matches(pattern, tails, n=3, cutoff=0.5)
    return f"; near it: {', '.join(close)}" if close else ""


def init(targets: Iterable[Target], seed: int) -> Arrays:
    """Fresh adapters, float32: A uniform within 1 / sqrt(in) (Kaiming with a = sqrt(5), as PEFT has it), B zero."""
    made: Arrays = {}
    for target in targets:
        bound = 1 / math.sqrt(target.inputs)
        unit = draws.generator(seed, f"init {target.name}").random((target.rank, target.inputs), dtype=np.float32)
        made[target.name + A] = mx.array((2 * unit - 1) * np.float32(bound))
        made[target.name + B] = mx.zeros((target.outputs, target.rank), mx.float32)
    return made


def scales(targets: Iterable[Target]) -> dict[str, float]:
    """The scale of each adapter by its Linear's name."""
    return {target.name: target.scale for target in targets}


def linear(adapters: Mapping[str, mx.array], scales: Mapping[str, float]) -> Linear:
    """A Linear that adds one block's adapters to its weights; names are relative to the block.

    The masters are cast to the dtype of x, here and inside the gradient: float32 arrays would widen the whole stream.
    """

    def apply(name: str, weight: Any, x: mx.array) -> mx.array:
        y = quantize.matmul(x, weight)
        if name + A not in adapters:
            return y
        down, up = adapters[name + A].astype(x.dtype), adapters[name + B].astype(x.dtype)
        return mx.addmm(y, scales[name] * (x @ down.T), up.T)

    return apply


def moved(adapters: Mapping[str, mx.array]) -> mx.array:
    """The largest magnitude in any B, a scalar: zero means that nothing was learnt."""
    return mx.max(mx.stack([mx.max(mx.abs(value)) for name, value in adapters.items() if name.endswith(B)]))
