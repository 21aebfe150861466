"""Measures of a ranking with one right answer per query, and their 95 % intervals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

CUT = 10  # ranks beyond this count as not found in MRR@10, R@10 and nDCG@10
Z = 1.959964  # of a 95 % interval
TIE = 1e-6  # scores that differ by less are equal: sums of products depend on their order by about 1e-7
RESAMPLES = 2000  # bootstrap samples of the queries


def rank_of(scores: np.ndarray, own: int, excluded: np.ndarray | None = None) -> int:
    """Return the rank of one document in the results of a query, counted from 1. `scores` is an array with the score of
    every document. `own` is the index of the ranked document. `excluded` is an array of indices of documents that are
    not counted. If it is None, all documents are counted. A document with an equal score counts as better.

    For `scores` = [3, 5, 3] and `own` = 0, the rank is 3. Scores that differ by less than `TIE` are equal.
    """
    better = scores >= scores[own] - TIE
    better[own] = False
    if excluded is not None:
        better[excluded] = False
    return 1 + int(better.sum())


def hit(ranks: np.ndarray) -> np.ndarray:
    """Return a float array with 1 for each rank that is 1, and 0 for each larger rank. `ranks` is an array of ranks
    from 1. The mean over all queries is P@1.
    """
    return np.where(ranks == 1, 1.0, 0.0)


def reciprocal(ranks: np.ndarray) -> np.ndarray:
    """Return a float array with 1 / rank for each rank up to 10, and 0 for each larger rank. `ranks` is an array of
    ranks from 1. The mean over all queries is MRR@10.
    """
    return np.where(ranks <= CUT, 1 / ranks, 0.0)


def recalled(ranks: np.ndarray) -> np.ndarray:
    """Return a float array with 1 for each rank up to 10, and 0 for each larger rank. `ranks` is an array of ranks from
    1. The mean over all queries is R@10.
    """
    return np.where(ranks <= CUT, 1.0, 0.0)


def gain(ranks: np.ndarray) -> np.ndarray:
    """Return a float array: 1 / log2(1 + rank) for each rank up to 10, and 0 for larger ranks. `ranks` is an array of
    ranks from 1. The mean over all queries is nDCG@10, if each query has one right answer.
    """
    return np.where(ranks <= CUT, 1 / np.log2(1 + ranks), 0.0)


MEASURES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "P@1": hit,
    "MRR@10": reciprocal,
    "R@10": recalled,
    "nDCG@10": gain,
}


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval (low, high) of an observed share, as fractions from 0 to 1. `share` is the
    observed fraction of successes among `count` trials.
    """
    if not count:
        return 0.0, 1.0
    centre = share + Z**2 / (2 * count)
    half = Z * np.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    scale = 1 + Z**2 / count
    return max(0.0, float((centre - half) / scale)), min(1.0, float((centre + half) / scale))


def bootstrap(values: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % bootstrap interval (low, high) of the mean of `values`. `values` is an array with one number per
    query. `seed` fixes the random samples. To compare two systems, subtract their numbers query by query and pass the
    differences. If `values` is empty, the result is (0, 0).
    """
    if not len(values):
        return 0.0, 0.0
    draws = np.random.default_rng(seed)
    means = [values[draws.integers(0, len(values), len(values))].mean() for _ in range(RESAMPLES)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
