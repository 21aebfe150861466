"""LoRAs joined into one, cut to a lower rank by singular values, and extracted. O outputs, I inputs, R rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx
import numpy as np

from stages.tuner.adapters import lora
from stages.tuner.adapters.targets import by_pattern, matches_pattern, similar_names
from stages.tuner.weights import Arrays

Scales = dict[str, float]  # the factor of a Linear's change, by the name of the Linear
Part = tuple[Mapping[str, mx.array], Mapping[str, float], float]  # arrays, scales, strength

NEGLIGIBLE = 1e-6  # singular values below this share of a Linear's largest are rounding


@dataclass(frozen=True)
class Cut:
    """A LoRA of limited rank that approximates a given change of weights."""

    arrays: Arrays  # float32, made for scales of 1
    errors: Mapping[str, tuple[float, float]]  # by Linear: squared Frobenius norms of what is lost, of the whole change

    @property
    def scales(self) -> Scales:
        return dict.fromkeys(self.errors, 1.0)

    @property
    def error(self) -> float:
        """Norm of what is lost over the norm of the whole change, Frobenius over all Linears; 0 if nothing was to change."""
        lost, whole = (sum(pair[side] for pair in self.errors.values()) for side in (0, 1))
        return math.sqrt(lost / whole) if whole else 0.0

    @property
    def worst(self) -> tuple[str, float]:
        relative = {name: math.sqrt(lost / whole) if whole else 0.0 for name, (lost, whole) in self.errors.items()}
        return max(relative.items(), key=lambda item: item[1])

    def __or__(self, other: Cut) -> Cut:
        return Cut(self.arrays | other.arrays, {**self.errors, **other.errors})


def weighted(
    arrays: Mapping[str, mx.array], scales: Mapping[str, float], factors: Mapping[str, float] | None
) -> tuple[Arrays, Scales]:
    """With the change of each Linear times the factor of the longest pattern that matches it; those of factor 0 are left out.

    Raises ValueError for a pattern that matches nothing.
    """
    if not factors:
        return dict(arrays), dict(scales)
    for pattern in factors:
        if not any(matches_pattern(name, pattern) for name in scales):
            raise ValueError(f"{pattern!r} matches no Linear of the adapter{similar_names(pattern, scales)}")
    kept = {name: scale * factor for name, scale in scales.items() if (factor := by_pattern(name, factors, 1.0))}
    return {name + suffix: value for name in kept for suffix, value in lora.arrays_of_linear(arrays, name).items()}, kept


def norm(arrays: Mapping[str, mx.array], name: str, scale: float) -> float:
    """Frobenius norm of what a Linear's adapter adds to its weight; of a DoRA, before its rows get their lengths."""
    own = {suffix: np.asarray(value.astype(mx.float32)) for suffix, value in lora.arrays_of_linear(arrays, name).items()}
    if lora.A in own:
        # |B A|^2 is the sum over (B^T B) (A A^T): the large product is not built.
        down_RI, up_OR = own[lora.A].astype(np.float64), own[lora.B].astype(np.float64)
        return abs(scale) * math.sqrt(max(float(((up_OR.T @ up_OR) * (down_RI @ down_RI.T)).sum()), 0.0))
    if lora.W1 in own:
        second = own[lora.W2] if lora.W2 in own else own[lora.W2_A] @ own[lora.W2_B]
        return abs(scale) * float(np.linalg.norm(own[lora.W1]) * np.linalg.norm(second))
    return abs(scale) * float(np.linalg.norm(own[lora.DIFF]))


def power_weights(steps: Sequence[int], width: float) -> list[float]:
    """What each of these steps' arrays counts in an average of relative width `width`, as if they had stayed the same since the
    step before. With one for every step it is the power function average of Karras et al. 2023, arXiv 2312.02696: weight t^gamma,
    whose standard deviation is `width` times the length of the run. Their sum is 1.
    """
    # (gamma + 1) / ((gamma + 2)^2 (gamma + 3)) = width^2
    gamma = max(root.real for root in np.roots([1, 7, 16 - width**-2, 12 - width**-2]))
    edges = [(step / steps[-1]) ** (gamma + 1) for step in (0, *steps)]
    return [float(after - before) for before, after in pairwise(edges)]


def average(
    parts: Iterable[tuple[Mapping[str, mx.array], Mapping[str, float]]], weights: Sequence[float]
) -> tuple[Arrays, Scales]:
    """The mean of the arrays of adapters of one run, as a moving average in training is. ValueError if they differ in arrays."""
    total: Arrays = {}
    scales: Scales = {}
    for (arrays, own), weight in zip(parts, weights, strict=True):
        if total and (arrays.keys() != total.keys() or own != scales):
            raise ValueError("the checkpoints are not of one run: they have other Linears, ranks or scales")
        scales = dict(own)
        total = {key: value * weight + total.get(key, 0.0) for key, value in arrays.items()}
        mx.eval(total)  # one checkpoint in memory at a time
    return total, scales


def join(parts: Sequence[Part]) -> tuple[Arrays, Scales]:
    """A LoRA whose change is the sum of the parts' changes. Raises ValueError for parts that do not fit together."""
    arrays: Arrays = {}
    for name in dict.fromkeys(name for _, scales, _ in parts for name in scales):
        # The ranks of a Linear add up, and the scales and strengths go into B.
        downs, ups = [], []
        for source, scales, strength in parts:
            if name in scales:
                down_RI, up_OR = plain_pair(source, name)
                downs.append(down_RI)
                ups.append(up_OR * (scales[name] * strength))
        shapes = {(up.shape[0], down.shape[1]) for up, down in zip(ups, downs, strict=True)}
        if len(shapes) > 1:
            raise ValueError(f"{name} has the shapes {sorted(shapes)} in these adapters: are they of one model?")
        arrays |= {name + lora.A: mx.concatenate(downs), name + lora.B: mx.concatenate(ups, axis=1)}
    return arrays, dict.fromkeys((key.removesuffix(lora.A) for key in arrays if key.endswith(lora.A)), 1.0)


def plain_pair(arrays: Mapping[str, mx.array], name: str) -> tuple[mx.array, mx.array]:
    """Raises ValueError unless the Linear has a plain LoRA."""
    own = lora.arrays_of_linear(arrays, name)
    if own.keys() != {lora.A, lora.B}:
        raise ValueError(f"{name} has a DoRA, a LoKr or a whole difference; only plain LoRAs can be combined and resized")
    return own[lora.A].astype(mx.float32), own[lora.B].astype(mx.float32)


def resize(arrays: Mapping[str, mx.array], scales: Mapping[str, float], rank: int) -> Cut:
    """The best approximation of a plain LoRA by one of at most this rank. Raises ValueError for another variant."""
    found: Arrays = {}
    errors = {}
    for name, scale in scales.items():
        # In float64, by NumPy.
        down_RI, up_OR = (np.asarray(each, dtype=np.float64) for each in plain_pair(arrays, name))
        # B A = Q_b (R_b R_a^T) Q_a^T: the singular values of the large product are those of the small one in brackets.
        basis_OR, upper_b = np.linalg.qr(up_OR * scale)
        basis_IR, upper_a = np.linalg.qr(down_RI.T)
        left, values, right = np.linalg.svd(upper_b @ upper_a.T)
        found |= _pair(name, (basis_OR @ left)[:, :rank], values[:rank], (right @ basis_IR.T)[:rank])
        errors[name] = float((values[rank:] ** 2).sum()), float((values**2).sum())
    return Cut(found, errors)


def extract(name: str, difference_OI: mx.array, rank: int) -> Cut:
    """The best LoRA of at most this rank for one change of a weight. No arrays if the change is zero."""
    change_OI = np.asarray(difference_OI.astype(mx.float32), dtype=np.float64)
    whole = float((change_OI**2).sum())
    if not whole:
        return Cut({}, {})
    left, values, right = _largest(change_OI, rank)
    lost = max(whole - float((values**2).sum()), 0.0)
    return Cut(_pair(name, left, values, right), {name: (lost, whole)})


def _largest(matrix_OI: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The `rank` largest singular values, largest first, with their vectors; those that are rounding errors are left out."""
    if matrix_OI.shape[0] < matrix_OI.shape[1]:
        left, values, right = _largest(matrix_OI.T, rank)
        return right.T, values, left.T
    # The eigenvectors of the smaller Gram matrix take a fraction of the time of a whole decomposition.
    squares, vectors = np.linalg.eigh(matrix_OI.T @ matrix_OI)
    values = np.sqrt(np.maximum(squares[::-1][:rank], 0))
    kept = values > NEGLIGIBLE * values[0]
    right_IR, values = vectors[:, ::-1][:, :rank][:, kept], values[kept]
    return matrix_OI @ right_IR / values, values, right_IR.T


def _pair(name: str, left_OR: np.ndarray, values_R: np.ndarray, right_RI: np.ndarray) -> Arrays:
    # Both factors take the root of a singular value, so A and B have values of similar size.
    roots = np.sqrt(values_R)
    down, up = roots[:, None] * right_RI, left_OR * roots
    return {name + lora.A: mx.array(down.astype(np.float32)), name + lora.B: mx.array(up.astype(np.float32))}
