"""Which Linears get an adapter, of which rank, alpha and variant, and with which arrays it starts."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

import mlx.core as mx
import numpy as np

from stages.settings import nearest
from stages.tuner import draws
from stages.tuner.adapters import lora
from stages.tuner.adapters.lora import A, B
from stages.tuner.weights import Arrays, Weight, read

Variant = Literal["lora", "dora", "lokr"]
Shapes = Mapping[str, tuple[int, int]]  # name of a Linear -> (outputs, inputs)
T = TypeVar("T")


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
    orthogonal: bool = False  # start, of a LoRA

    @property
    def scale(self) -> float:
        """Factor of the adapter's change; 1 for "full" and for a LoKr whose w2 is whole."""
        if not lora.kind_of(self.shapes).scaled:
            return 1.0
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        if self.variant == "full":
            return {lora.DIFF: (self.outputs, self.inputs)}
        if self.variant == "lokr":
            return lora.lokr_shapes(self.outputs, self.inputs, self.rank, self.factor)
        if self.orthogonal:
            down, up = (self.rank, self.inputs), (self.outputs, self.rank)
            return {lora.Q: down, lora.P: up, lora.LAMBDA: (self.rank,), lora.Q0: down, lora.P0: up}
        pair: dict[str, tuple[int, ...]] = {A: (self.rank, self.inputs), B: (self.outputs, self.rank)}
        return pair | {lora.MAGNITUDE: (self.outputs,)} if self.variant == "dora" else pair


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
    orthogonal: bool = False,
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
        # Rank 0 leaves a Linear out.
        if own_rank := by_pattern(name, ranks, rank):
            if own_rank > min(outputs, inputs) and variant != "lokr":
                narrow = f"{min(outputs, inputs)} for {name} ({outputs} x {inputs})"
                raise ValueError(f"rank must be <= {narrow}, got {own_rank:g}: a larger one adds nothing; see rank_for")
            own_alpha = by_pattern(name, alphas, own_rank if alpha is None else alpha)
            targets.append(Target(name, outputs, inputs, int(own_rank), float(own_alpha), variant, rslora, factor, orthogonal))
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


def by_pattern(name: str, values: Mapping[str, T] | None, default: T) -> T:
    """The value of the longest pattern that matches; of equally long ones, the first by the alphabet."""
    found = [pattern for pattern in values or {} if matches_pattern(name, pattern)]
    return (values or {})[min(found, key=lambda pattern: (-len(pattern), pattern))] if found else default


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
    times = 2 if first.orthogonal else 1
    metadata = {"variant": first.variant, "rank": str(times * first.rank), "alpha": f"{first.alpha:g}"}
    # Without "scales", readers divide the one alpha by the rank of each Linear's own arrays: with alpha 8 in the header, a
    # Linear of rank 16 and alpha 16 would get 0.5 instead of 1. Linears that always have scale 1 are not compared.
    scaled = [target for target in chosen if lora.kind_of(target.shapes).scaled]
    if any(target.scale != float(metadata["alpha"]) / (times * target.rank) for target in scaled):
        metadata["scales"] = json.dumps(target_scales(chosen))
    return metadata


# How an adapter starts: fresh, so that it changes nothing, or with the arrays of another adapter

RANK_AXIS = {lora.A: 0, lora.B: 1, lora.W2_A: 1, lora.W2_B: 0}  # the axis of length rank, by suffix


def target_weights(blocks: Iterable[Any], targets: Iterable[Target]) -> dict[str, Weight]:
    every = {f"{block.name}.{name}": weight for block in blocks for name, weight in block.weights.items()}
    return {target.name: every[f"{target.name}.weight"] for target in targets}


def fresh_adapter(targets: Iterable[Target], seed: int, weights: Mapping[str, Weight] | None = None) -> Arrays:
    """Float32 arrays that change nothing yet; random values depend only on seed, key and shape. Only DoRA needs `weights`."""
    arrays: Arrays = {}
    for target in targets:
        if target.orthogonal:
            arrays |= {target.name + suffix: value for suffix, value in _orthogonal_start(target, seed).items()}
            continue
        for suffix, shape in target.shapes.items():
            if suffix == lora.MAGNITUDE:
                assert weights is not None, "DoRA's magnitudes start as the norms of the weights' rows"
                # The same arithmetic as in training, with a B of zeros: the norms are equal to the last bit.
                down_RI, up_OR = mx.zeros((1, target.inputs)), mx.zeros((target.outputs, 1))
                arrays[target.name + suffix] = lora.row_norms(read(weights[target.name]), down_RI, up_OR, 0.0)
                mx.eval(arrays[target.name + suffix])  # one weight in float32 at a time
            elif suffix in lora.ZERO_AT_START:
                arrays[target.name + suffix] = mx.zeros(shape, mx.float32)
            else:
                purpose = f"init {target.name}" if suffix == lora.A else f"init {target.name}{suffix}"
                unit = draws.generator(seed, purpose).random(shape, dtype=np.float32)
                # Within 1 / sqrt(columns): Kaiming's bound with a = sqrt(5), as in PEFT and LyCORIS.
                arrays[target.name + suffix] = mx.array((2 * unit - 1) * np.float32(1 / math.sqrt(shape[1])))
    return arrays


def _orthogonal_start(target: Target, seed: int) -> Arrays:
    """The last `rank` singular vectors and values of a matrix of normal values with standard deviation 1 / rank."""

    def columns(rows: int, purpose: str) -> np.ndarray:
        normal = draws.normal((rows, target.rank), seed, f"init {target.name}{purpose}").astype(np.float64)
        # Singular vectors of such a matrix are uniform, as these columns are: no decomposition of the large matrix is needed.
        orthogonal, upper = np.linalg.qr(normal)
        return (orthogonal * np.sign(np.diag(upper))).astype(np.float32)

    down_RI, up_OR = columns(target.inputs, lora.Q).T, columns(target.outputs, lora.P)
    values_R = (smallest_singular_values(target.outputs, target.inputs, target.rank) / target.rank).astype(np.float32)
    q, p, values = mx.array(down_RI), mx.array(up_OR), mx.array(values_R)
    return {lora.Q: q, lora.P: p, lora.LAMBDA: values, lora.Q0: q, lora.P0: p * values}


def smallest_singular_values(rows: int, columns: int, count: int) -> np.ndarray:
    """What is expected of a matrix of standard normal values, largest of the `count` first. Marchenko and Pastur 1967."""
    small, large = min(rows, columns), max(rows, columns)
    low, high = 1 - math.sqrt(small / large), 1 + math.sqrt(small / large)
    # Nodes that are dense at both edges, where the density is 0 or has its peak.
    s = low + (high - low) * (1 - np.cos(np.linspace(0, np.pi, 20_001))) / 2
    middle = (s[1:] + s[:-1]) / 2
    share = np.cumsum(np.sqrt((high**2 - middle**2) * (middle**2 - low**2)) / middle * np.diff(s))
    wanted = (np.arange(count, 0, -1) - 0.5) / small
    found: np.ndarray = np.interp(wanted, np.concatenate([[0], share / share[-1]]), s) * math.sqrt(large)
    return found


def start_from_adapter(
    source: Mapping[str, mx.array],
    scales: Mapping[str, float],
    targets: Iterable[Target],
    fresh: Mapping[str, mx.array],
    weights: Mapping[str, Weight] | None = None,
) -> Arrays:
    """Arrays that change the model as `source` does, up to rounding; what it lacks comes from `fresh`. Raises ValueError."""
    chosen = list(targets)
    check_initial(source, scales, chosen)
    arrays: Arrays = {}
    for target in chosen:
        name, own = target.name, lora.arrays_of_linear(fresh, target.name)
        if name in scales:
            for suffix, value in lora.arrays_of_linear(source, name).items():
                # B, or LoKr's w2, takes the ratio of the scales, so that the change of the weight stays the same.
                ratio = scales[name] / target.scale if suffix in lora.ZERO_AT_START else 1.0
                scaled, rest, axis = value.astype(mx.float32) * ratio, own[suffix], RANK_AXIS.get(suffix)
                if axis is not None and scaled.shape[axis] != rest.shape[axis]:
                    # What is filled in changes nothing yet: the fresh part of B, or of LoKr's w2_b, is zero.
                    scaled = mx.concatenate([scaled, mx.split(rest, [scaled.shape[axis]], axis=axis)[1]], axis=axis)
                own[suffix] = scaled
            if target.variant == "dora" and name + lora.MAGNITUDE not in source:
                assert weights is not None, "the magnitudes of a LoRA are the row norms of its adapted weights"
                own[lora.MAGNITUDE] = lora.row_norms(read(weights[name]), own[lora.A], own[lora.B], target.scale)
                mx.eval(own[lora.MAGNITUDE])
        arrays |= {name + suffix: value.astype(mx.float32) for suffix, value in own.items()}
    return arrays


def check_initial(source: Mapping[str, mx.array], scales: Mapping[str, float], targets: Iterable[Target]) -> None:
    """Raises ValueError unless `source` can start `targets`: same variant and shapes, no larger rank, finite values."""
    chosen = {target.name: target for target in targets}
    for name in scales:
        if name not in chosen:
            raise ValueError(f"the adapter has {name}, which is not a target: add it to the targets{nearest(name, chosen)}")
        arrays = lora.arrays_of_linear(source, name)
        target = chosen[name]
        given = {*arrays} if target.variant != "dora" else {*arrays, lora.MAGNITUDE}
        if given != {*target.shapes}:
            wanted, had = lora.kind_of(target.shapes).name, lora.kind_of(arrays).name
            raise ValueError(f"the adapter of {name} must be {wanted}, got {had}")
        shape, expected = lora.linear_shape(arrays), (target.outputs, target.inputs)
        if shape != expected:
            raise ValueError(f"the adapter of {name} must be for shape {expected}, got {shape}: is it of another model?")
        for suffix, value in arrays.items():
            _check_array(target, suffix, value.shape)
    for name, value in source.items():
        if not mx.all(mx.isfinite(value)).item():
            raise ValueError(f"the adapter's {name} has values that are not finite: choose an earlier checkpoint")


def _check_array(target: Target, suffix: str, shape: tuple[int, ...]) -> None:
    expected, rank_axis = target.shapes[suffix], RANK_AXIS.get(suffix)
    # A larger rank is refused: cutting it by singular values would give another adapter than the one that was named.
    if rank_axis is not None and shape[rank_axis] > expected[rank_axis]:
        most, rank = expected[rank_axis], shape[rank_axis]
        raise ValueError(f"the adapter of {target.name} must have a rank <= {most}, got {rank}: raise the rank to {rank}")
    if any(had != want for axis, (had, want) in enumerate(zip(shape, expected, strict=True)) if axis != rank_axis):
        remedy = "set the factor that it was trained with"
        raise ValueError(f"{suffix[1:]} of {target.name} must have the shape {expected}, got {tuple(shape)}: {remedy}")
