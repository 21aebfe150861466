"""Adapters of frozen Linears, in three variants: LoRA, DoRA, LoKr. Which Linears, how large, how they start, what they add.

LoRA: y = x W^T + scale (x A^T) B^T, with A (rank, in) and B (out, rank). Hu et al. 2021, arXiv 2106.09685. B starts at
zero, so that the first step sees the base model exactly. scale is alpha / rank, or alpha / sqrt(rank) for rsLoRA
(Kalajdzievski 2023, arXiv 2312.03732). DoRA adds a magnitude per row (dora.py); LoKr is a Kronecker product (lokr.py).

An adapter is a flat dict of float32 masters, "<linear>.<array>": which arrays a Linear has says what its adapter is.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from stages.tuner import draws
from stages.tuner.adapters import dora, lokr
from stages.tuner.adapters.product import product, scaled
from stages.tuner.blockwise import quantize

Arrays = dict[str, mx.array]
Linear = Callable[[str, Any, mx.array], mx.array]  # (name within the block, weight, x) -> y
Variant = Literal["lora", "dora", "lokr"]

A, B = ".lora_A.weight", ".lora_B.weight"
ENDINGS = (A, B, dora.MAGNITUDE, lokr.W1, lokr.W2, lokr.W2_A, lokr.W2_B)
ZERO = (B, lokr.W2, lokr.W2_B)  # what starts at zero, and says by moving that something was learnt


@dataclass(frozen=True)
class Target:
    """One Linear that gets an adapter: its name, its weight's shape (out, in), and the adapter's kind and size."""

    name: str
    outputs: int
    inputs: int
    rank: int
    alpha: float
    variant: Variant = "lora"
    rslora: bool = False
    factor: int | None = None  # LoKr: see lokr.factors

    @property
    def scale(self) -> float:
        """What the adapter's output is multiplied by."""
        if lokr.W2 in self.shapes:
            return 1.0
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Its arrays: their endings and shapes."""
        if self.variant == "lokr":
            return dict(lokr.shapes(self.outputs, self.inputs, self.rank, self.factor))
        pair: dict[str, tuple[int, ...]] = {A: (self.rank, self.inputs), B: (self.outputs, self.rank)}
        return pair | {dora.MAGNITUDE: (self.outputs,)} if self.variant == "dora" else pair


def choose(
    linears: Mapping[str, tuple[int, int]],
    patterns: Iterable[str],
    rank: int,
    alpha: float | None = None,
    *,
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float] | None = None,
    variant: Variant = "lora",
    rslora: bool = False,
    factor: int | None = None,
) -> list[Target]:
    """The Linears that any pattern names, in the model's order.

    A pattern has shell wildcards and names a Linear from its first part on, or from any later part: "*" is all,
    "attn.to_q" that of every block, "single_transformer_blocks.*" every Linear of those blocks. `ranks` and `alphas` map
    patterns to a rank or an alpha of their own, the first that matches; a rank of 0 leaves the Linear out. alpha is the
    Linear's rank where none is given. ValueError for a pattern that names nothing, or a setting that makes no sense.
    """
    wanted = list(patterns)
    if not wanted:
        raise ValueError('targets: there is none; give patterns of Linears, or ["*"] for every one of the blocks')
    for pattern in wanted:
        if not any(matches(name, pattern) for name in linears):
            raise ValueError(f"targets: {pattern!r} matches no Linear of the blocks{nearest(pattern, linears)}")
    found = {name: shape for name, shape in linears.items() if any(matches(name, p) for p in wanted)}
    for what, own in (("rank", ranks or {}), ("alpha", alphas or {})):
        for pattern, value in own.items():
            if not any(matches(name, pattern) for name in found):
                raise ValueError(f"{what}_for: {pattern!r} applies to no target{nearest(pattern, found)}")
            if value < 0 or (what == "alpha" and value == 0):
                raise ValueError(
                    f"{what}_for: {value} of {pattern!r} is wrong; above 0 is wanted, or a rank of 0 to leave Linears out"
                )
    if rslora and alpha is None:
        same = f"{math.sqrt(rank):.3g}"
        raise ValueError(f"rslora: it divides alpha by the root of the rank, so it needs an alpha; {same} changes nothing")
    made = []
    for name, (out, into) in found.items():
        own_rank = _first(name, ranks, rank)
        own_alpha = _first(name, alphas, own_rank if alpha is None else alpha)
        if own_rank:
            made.append(Target(name, out, into, int(own_rank), float(own_alpha), variant, rslora, factor))
    if not made:
        raise ValueError("rank_for: no target is left, the rank of every one is 0")
    return made


def _first(name: str, own: Mapping[str, float] | None, otherwise: float) -> float:
    """The value of the first pattern that names a Linear."""
    return next((value for pattern, value in (own or {}).items() if matches(name, pattern)), otherwise)


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


def init(targets: Iterable[Target], seed: int, bases: Mapping[str, quantize.Weight] | None = None) -> Arrays:
    """Fresh adapters, float32, that change nothing yet. DoRA needs the weights of its Linears: see `bases_of`.

    Random arrays are uniform within 1 / sqrt(columns): Kaiming with a = sqrt(5), as PEFT and LyCORIS have it.
    """
    made: Arrays = {}
    for target in targets:
        for ending, shape in target.shapes.items():
            if ending == dora.MAGNITUDE:
                assert bases is not None, "the magnitudes of DoRA start as the lengths of the base's rows"
                made[target.name + ending] = dora.start(bases[target.name], target.outputs, target.inputs)
                mx.eval(made[target.name + ending])  # one weight in float32 at a time
            elif ending in ZERO:
                made[target.name + ending] = mx.zeros(shape, mx.float32)
            else:
                made[target.name + ending] = _uniform(seed, target.name, ending, shape)
    return made


def _uniform(seed: int, name: str, ending: str, shape: tuple[int, ...]) -> mx.array:
    """One array's random start: it depends on no other's."""
    drawn_for = f"init {name}" if ending == A else f"init {name}{ending}"
    unit = draws.generator(seed, drawn_for).random(shape, dtype=np.float32)
    return mx.array((2 * unit - 1) * np.float32(1 / math.sqrt(shape[1])))


def bases_of(blocks: Iterable[Any], targets: Iterable[Target]) -> dict[str, quantize.Weight]:
    """The weight of each target, by its full name, from blocks with a `name` and `weights` named within them."""
    every = {f"{block.name}.{name}": weight for block in blocks for name, weight in block.weights.items()}
    return {target.name: every[f"{target.name}.weight"] for target in targets}


def scales(targets: Iterable[Target]) -> dict[str, float]:
    """The scale of each adapter by its Linear's name."""
    return {target.name: target.scale for target in targets}


def described(targets: Iterable[Target]) -> dict[str, str]:
    """What a file's header must say so that a reader finds the scales: `scales` by name, unless alpha / rank gives them."""
    chosen = list(targets)
    first = chosen[0]
    said = {"variant": first.variant, "rank": str(first.rank), "alpha": f"{first.alpha:g}"}
    if any(t.scale != first.alpha / t.rank and lokr.W2 not in t.shapes for t in chosen):
        said["scales"] = json.dumps(scales(chosen))
    return said


def linear(adapters: Mapping[str, mx.array], scales: Mapping[str, float]) -> Linear:
    """A Linear that adds one block's adapters to its weights; names are relative to the block.

    The masters are cast to the dtype of x, here and inside the gradient: float32 arrays would widen the whole stream.
    """

    def apply(name: str, weight: Any, x: mx.array) -> mx.array:
        own = of_linear(adapters, name)
        if not own:
            return product(x, weight)
        if lokr.W1 in own:
            return product(x, weight) + scaled(lokr.change(x, own), scales[name])
        y = product(x, weight, (own[A].astype(x.dtype), own[B].astype(x.dtype)), scales[name])
        if dora.MAGNITUDE not in own:
            return y
        return dora.stretch(y, own[dora.MAGNITUDE], weight, own[A], own[B], scales[name])

    return apply


def of_linear(adapters: Mapping[str, mx.array], name: str) -> Arrays:
    """The arrays of one Linear by their endings."""
    return {ending: adapters[name + ending] for ending in ENDINGS if name + ending in adapters}


def shape_of(arrays: Mapping[str, mx.array]) -> tuple[int, int]:
    """(outputs, inputs) of the Linear that arrays, keyed by their endings, belong to."""
    if A in arrays:
        return arrays[B].shape[0], arrays[A].shape[1]
    outer, inner = arrays[lokr.W1].shape, (arrays.get(lokr.W2_A, arrays.get(lokr.W2)), arrays.get(lokr.W2_B, arrays.get(lokr.W2)))
    assert inner[0] is not None and inner[1] is not None
    return outer[0] * inner[0].shape[0], outer[1] * inner[1].shape[1]


def moved(adapters: Mapping[str, mx.array]) -> mx.array:
    """The largest magnitude in anything that started at zero, a scalar: zero means that nothing was learnt."""
    return mx.max(mx.stack([mx.max(mx.abs(value)) for name, value in adapters.items() if name.endswith(ZERO)]))
