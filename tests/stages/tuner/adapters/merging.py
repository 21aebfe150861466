"""A whole model merged with an adapter."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from stages.tuner.adapters import lora
from stages.tuner.adapters.merge import merge
from stages.tuner.quantize import Weight


def merged_weights(
    weights: Mapping[str, Weight], adapters: Mapping[str, mx.array], scales: Mapping[str, float]
) -> dict[str, Weight]:
    """All weights by name, "<linear>.weight" and the like; those of the Linears in `scales` are merged with their adapters."""
    merged = {
        f"{name}.weight": merge(weights[f"{name}.weight"], lora.arrays_of_linear(adapters, name), scales[name]) for name in scales
    }
    return {**weights, **merged}
