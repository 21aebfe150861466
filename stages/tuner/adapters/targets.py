"""Which Linears get an adapter: patterns of names, and the rank, alpha and variant of each."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from stages.tuner.adapters import dora, lokr
from stages.tuner.adapters.lora import A, B

Variant = Literal["lora", "dora", "lokr"]
Shapes = Mapping[str, tuple[int, int]]  # name of a Linear -> (outputs, inputs)


@dataclass(frozen=True)
class Target:
    """One Linear that gets an adapter: its name, its weight's shape (outputs, inputs), and the adapter's variant, rank and
    alpha. `rslora` divides alpha by sqrt(rank) instead of rank (Kalajdzievski 2023, arXiv 2312.03732). `factor` bounds the
    sides of LoKr's first matrix, see `lokr.factorize`.
    """

    name: str
    outputs: int
    inputs: int
    rank: int
    alpha: float
    variant: Variant = "lora"
    rslora: bool = False
    factor: int | None = None

    @property
    def scale(self) -> float:
        """The factor of the adapter's output: alpha / rank, or alpha / sqrt(rank) for rsLoRA; 1 for a LoKr whose second factor
        is whole.
        """
        if lokr.W2 in self.shapes:
            return 1.0
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the adapter's arrays by suffix, such as {".lora_A.weight": (rank, inputs), ...}."""
        if self.variant == "lokr":
            return dict(lokr.array_shapes(self.outputs, self.inputs, self.rank, self.factor))
        pair: dict[str, tuple[int, ...]] = {A: (self.rank, self.inputs), B: (self.outputs, self.rank)}
        return pair | {dora.MAGNITUDE: (self.outputs,)} if self.variant == "dora" else pair


def select_targets(
    linears: Shapes,
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
    """Return a Target for each Linear whose name matches any of `patterns`, see `matches_pattern`. `linears` maps names to
    (outputs, inputs), and its order is kept. `alpha` None means the Linear's rank. `ranks` and `alphas` map patterns to other
    values: the first pattern that matches a Linear counts, and rank 0 leaves the Linear out. ValueError if a pattern matches
    nothing, a rank or alpha is out of range, or no target remains.
    """
    chosen = _matching_linears(linears, list(patterns))
    _check_overrides("rank_for", ranks or {}, chosen, zero_allowed=True)
    _check_overrides("alpha_for", alphas or {}, chosen, zero_allowed=False)
    if rslora and alpha is None:
        neutral = f"{math.sqrt(rank):.3g}"
        raise ValueError(f"rslora needs an alpha, which it divides by sqrt(rank); alpha = {neutral} gives a scale of 1")
    targets = []
    for name, (outputs, inputs) in chosen.items():
        if own_rank := _first_match(name, ranks, rank):
            own_alpha = _first_match(name, alphas, own_rank if alpha is None else alpha)
            targets.append(Target(name, outputs, inputs, int(own_rank), float(own_alpha), variant, rslora, factor))
    if not targets:
        raise ValueError("rank_for must leave at least one target a rank above 0, got rank 0 for all of them")
    return targets


def _matching_linears(linears: Shapes, patterns: Sequence[str]) -> dict[str, tuple[int, int]]:
    if not patterns:
        raise ValueError('targets must have at least one pattern, got none; ["*"] is every Linear of the blocks')
    for pattern in patterns:
        if not any(matches_pattern(name, pattern) for name in linears):
            raise ValueError(f"targets: {pattern!r} matches no Linear of the blocks{similar_names(pattern, linears)}")
    return {name: shape for name, shape in linears.items() if any(matches_pattern(name, pattern) for pattern in patterns)}


def _check_overrides(setting: str, values: Mapping[str, float], targets: Iterable[str], zero_allowed: bool) -> None:
    names = list(targets)
    for pattern, value in values.items():
        if not any(matches_pattern(name, pattern) for name in names):
            raise ValueError(f"{setting}: {pattern!r} matches no target{similar_names(pattern, names)}")
        if value < 0 or (value == 0 and not zero_allowed):
            bound = ">= 0 (0 leaves the Linears out)" if zero_allowed else "> 0"
            raise ValueError(f"{setting}: the value of {pattern!r} must be {bound}, got {value}")


def _first_match(name: str, values: Mapping[str, float] | None, default: float) -> float:
    return next((value for pattern, value in (values or {}).items() if matches_pattern(name, pattern)), default)


def matches_pattern(name: str, pattern: str) -> bool:
    """Whether a pattern with shell wildcards matches the whole name of a Linear, or the part of it after any dot. "*" matches
    every name, "attn.to_q" that Linear in every block, "single_transformer_blocks.*" every Linear of those blocks.
    """
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def similar_names(pattern: str, names: Iterable[str]) -> str:
    """Return "; nearest: a, b" with up to three names that resemble `pattern`, or "" if none does, to be appended to an error
    message. Candidates are the parts of `names` after any dot, with "*" for block numbers, so that each is listed once.
    """
    endings: dict[str, None] = {}
    for name in names:
        parts = ["*" if part.isdigit() and at == 1 else part for at, part in enumerate(name.split("."))]
        endings |= {".".join(parts[start:]): None for start in range(len(parts)) if parts[start] != "*"}
    close = difflib.get_close_matches(pattern, endings, n=3, cutoff=0.5)
    return f"; nearest: {', '.join(close)}" if close else ""


def target_scales(targets: Iterable[Target]) -> dict[str, float]:
    """Return the factor of the adapter's output for each target, by the name of its Linear."""
    return {target.name: target.scale for target in targets}


def adapter_metadata(targets: Iterable[Target]) -> dict[str, str]:
    """Return the metadata that an adapter's file needs: "variant", "rank" and "alpha" of the first target, and "scales", JSON
    of `target_scales`, if alpha / rank does not give the scale of every target.
    """
    chosen = list(targets)
    first = chosen[0]
    metadata = {"variant": first.variant, "rank": str(first.rank), "alpha": f"{first.alpha:g}"}
    if any(t.scale != first.alpha / t.rank and lokr.W2 not in t.shapes for t in chosen):
        metadata["scales"] = json.dumps(target_scales(chosen))
    return metadata
