"""Which Linears get an adapter: patterns of names, and the rank, alpha and variant of each."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from stages.tuner.adapters import dora, full, lokr
from stages.tuner.adapters.lora import A, B

Variant = Literal["lora", "dora", "lokr"]
Shapes = Mapping[str, tuple[int, int]]  # name of a Linear -> (outputs, inputs)


@dataclass(frozen=True)
class Target:
    name: str
    outputs: int
    inputs: int
    rank: int  # without effect, like alpha, if the variant is "full"
    alpha: float
    variant: Variant | Literal["full"] = "lora"
    rslora: bool = False  # scale alpha / sqrt(rank): Kalajdzievski 2023, arXiv 2312.03732
    factor: int | None = None  # most rows, and columns, of LoKr's w1; None: no such limit

    @property
    def scale(self) -> float:
        """Factor of the adapter's change; 1 for "full" and for a LoKr whose w2 is whole."""
        if lokr.W2 in self.shapes or self.variant == "full":
            return 1.0
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By suffix."""
        if self.variant == "full":
            return {full.DIFF: (self.outputs, self.inputs)}
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
    whole: Sequence[str] = (),
) -> list[Target]:
    """The Linears to train, in the order of `linears`; those trained in full (`whole`) last. Raises ValueError."""
    trained_whole = _matching_linears(linears, whole, "full") if whole else {}
    rest = {name: shape for name, shape in linears.items() if name not in trained_whole}
    chosen = _matching_linears(rest, list(patterns))
    _check_overrides("rank_for", ranks or {}, chosen, zero_allowed=True)
    _check_overrides("alpha_for", alphas or {}, chosen, zero_allowed=False)
    # Alpha's default, the rank, would give a scale of sqrt(rank).
    if rslora and alpha is None:
        neutral = f"{math.sqrt(rank):.3g}"
        raise ValueError(f"rslora needs an alpha, which it divides by sqrt(rank); alpha = {neutral} gives a scale of 1")
    targets = []
    for name, (outputs, inputs) in chosen.items():
        # The first matching pattern counts; rank 0 leaves a Linear out.
        if own_rank := _first_match(name, ranks, rank):
            if own_rank > min(outputs, inputs) and variant != "lokr":
                narrow = f"{min(outputs, inputs)} for {name} ({outputs} x {inputs})"
                raise ValueError(f"rank must be <= {narrow}, got {own_rank:g}: a larger one adds nothing; see rank_for")
            own_alpha = _first_match(name, alphas, own_rank if alpha is None else alpha)
            targets.append(Target(name, outputs, inputs, int(own_rank), float(own_alpha), variant, rslora, factor))
    if not targets:
        raise ValueError("rank_for must leave at least one target a rank above 0, got rank 0 for all of them")
    return targets + [Target(name, *shape, 1, 1.0, "full") for name, shape in trained_whole.items()]


def _matching_linears(linears: Shapes, patterns: Sequence[str], setting: str = "targets") -> dict[str, tuple[int, int]]:
    if not patterns:
        raise ValueError('targets must have at least one pattern, got none; ["*"] is every Linear of the blocks')
    for pattern in patterns:
        if not any(matches_pattern(name, pattern) for name in linears):
            raise ValueError(f"{setting}: {pattern!r} matches no Linear of the blocks{similar_names(pattern, linears)}")
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
    """Whether a pattern with shell wildcards matches the whole name, or its end after any dot."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def similar_names(pattern: str, names: Iterable[str]) -> str:
    """A hint for an error: "; nearest: a, b" with "*" for the number of a block, or nothing."""
    endings: dict[str, None] = {}
    for name in names:
        parts = ["*" if part.isdigit() and at == 1 else part for at, part in enumerate(name.split("."))]
        endings |= {".".join(parts[start:]): None for start in range(len(parts)) if parts[start] != "*"}
    close = difflib.get_close_matches(pattern, endings, n=3, cutoff=0.5)
    return f"; nearest: {', '.join(close)}" if close else ""


def target_scales(targets: Iterable[Target]) -> dict[str, float]:
    return {target.name: target.scale for target in targets}


def adapter_metadata(targets: Iterable[Target]) -> dict[str, str]:
    """Header of an adapter's file. "scales" is there only where alpha / rank of a Linear is not its scale."""
    chosen = list(targets)
    first = chosen[0]
    metadata = {"variant": first.variant, "rank": str(first.rank), "alpha": f"{first.alpha:g}"}
    unscaled = (lokr.W2, full.DIFF)
    # Without "scales", readers divide the one alpha by the rank of each Linear's own arrays: with alpha 8 in the header, a
    # Linear of rank 16 and alpha 16 would get 0.5 instead of 1. Linears that always have scale 1 are not compared.
    if any(t.scale != float(metadata["alpha"]) / t.rank and not any(suffix in t.shapes for suffix in unscaled) for t in chosen):
        metadata["scales"] = json.dumps(target_scales(chosen))
    return metadata
