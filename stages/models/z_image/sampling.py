"""Z-Image's noise levels: those of its scheduler, which has one shift for all sizes."""

from __future__ import annotations

import numpy as np

SHIFT = 3.0  # towards 1


def sigmas(tokens: int, steps: int) -> list[float]:
    """Noise levels from 1 to 0: even levels u become 3 u / (1 + 2 u). Raises ValueError if steps < 1."""
    if steps < 1:
        raise ValueError(f"steps must be >= 1, got {steps}")
    return [SHIFT * u / (1 + (SHIFT - 1) * u) for u in np.linspace(1, 1 / steps, steps).tolist()] + [0.0]
