"""Measures of a ranking with one right answer per query, and their 95 % intervals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

CUT = 10  # ranks beyond this count as not found in MRR@10, R@10 and nDCG@10
Z = 1.959964  # of a 95 % interval
TIE = 1e-6  # scores that differ by less are equal: sums of products depend on their order by about 1e-7


def rank_of(scores: np.ndarray, own: int, excluded: np.ndarray | None = None) -> int:
    """From 1. Equal scores count as better, and `excluded` documents not at all."""
    better = scores >= scores[own] - TIE
    better[own] = False
    if excluded is not None:
        better[excluded] = False
    return 1 + int(better.sum())


def reciprocal(ranks: np.ndarray) -> np.ndarray:
    """Its mean is MRR@10."""
    return np.where(ranks <= CUT, 1 / ranks, 0.0)


# Their means are the measures; nDCG@10 with one right answer per query.
MEASURES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "P@1": lambda ranks: np.where(ranks == 1, 1.0, 0.0),
    "MRR@10": reciprocal,
    "R@10": lambda ranks: np.where(ranks <= CUT, 1.0, 0.0),
    "nDCG@10": lambda ranks: np.where(ranks <= CUT, 1 / np.log2(1 + ranks), 0.0),
}


def wilson(share: float, count: int) -> tuple[float, float]:
    """95 % Wilson interval of a share of `count` trials."""
    if not count:
        return 0.0, 1.0
    centre = share + Z**2 / (2 * count)
    half = Z * np.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    scale = 1 + Z**2 / count
    return max(0.0, float((centre - half) / scale)), min(1.0, float((centre + half) / scale))
