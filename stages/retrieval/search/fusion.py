"""Add the scores of two searches. Sums of z-scores beat sums of reciprocal ranks if one search is weaker than the other."""

from __future__ import annotations

import numpy as np

WEIGHTS = tuple(round(0.05 * n, 2) for n in range(21))  # of the semantic scores, from which the best on valid queries is taken
DEFAULT_WEIGHT = 0.5  # where nothing was measured yet


def zscores(scores: np.ndarray) -> np.ndarray:
    """Along the last axis. Equal scores become 0."""
    centred = scores - scores.mean(axis=-1, keepdims=True, dtype=np.float64)
    spread = centred.std(axis=-1, keepdims=True, dtype=np.float64)
    return np.asarray(centred / np.where(spread > 1e-12, spread, 1.0), np.float32)


def hybrid(semantic: np.ndarray, lexical: np.ndarray, weight: float) -> np.ndarray:
    """Weighted mean of the z-scores, documents on the last axis. `weight`: share of the semantic scores, 0 to 1."""
    # MRR@10 beyond BM25's, on 865 queries of the standard library: z-scores at .5 +.039 [.026, .052], reciprocal ranks at .2
    # +.009 [-.008, .026].
    return weight * zscores(semantic) + (1 - weight) * zscores(lexical)
