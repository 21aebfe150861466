"""The noise levels of FLUX 3 Image: one shift for all sizes."""

from __future__ import annotations

from stages.models.sampling import shifted

SHIFT = 6.93  # towards 1


def sigmas(tokens: int, steps: int) -> list[float]:
    """Noise levels from 1 to 0. Raises ValueError if steps < 1."""
    return shifted(SHIFT, steps)
