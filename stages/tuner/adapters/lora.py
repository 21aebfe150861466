"""The arrays of an adapter and what they add to a frozen Linear. LoRA: Hu et al. 2021, arXiv 2106.09685.

y = x W^T + scale (x A^T) B^T with A (rank, inputs) and B (outputs, rank).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from stages import kernels
from stages.tuner.adapters import dora, full, lokr
from stages.tuner.adapters.product import product, scaled

# An adapter: float32 arrays by "<linear><suffix>". The suffixes that a Linear has give its variant.
Arrays = dict[str, mx.array]
Linear = Callable[[str, Any, mx.array], mx.array]  # (name within the block, weight, x) -> y

A, B = ".lora_A.weight", ".lora_B.weight"
SUFFIXES = (A, B, dora.MAGNITUDE, lokr.W1, lokr.W2, lokr.W2_A, lokr.W2_B, full.DIFF)
ZERO_AT_START = (B, lokr.W2, lokr.W2_B, full.DIFF)  # arrays that start at zero, so that a fresh adapter changes nothing


def adapted_linear(adapters: Mapping[str, mx.array], scales: Mapping[str, float]) -> Linear:
    """The function that computes the Linears of one block with their adapters. Names are within the block."""

    # The arrays are cast to the dtype of x here, inside the gradient: float32 arrays would widen all activations.
    def apply(name: str, weight: Any, x: mx.array) -> mx.array:
        own = arrays_of_linear(adapters, name)
        if not own:
            return product(x, weight)
        if full.DIFF in own:
            return product(x, weight) + scaled(kernels.linear(x, own[full.DIFF].astype(x.dtype)), scales[name])
        if lokr.W1 in own:
            return product(x, weight) + scaled(lokr.output_change(x, own), scales[name])
        y = product(x, weight, (own[A].astype(x.dtype), own[B].astype(x.dtype)), scales[name])
        if dora.MAGNITUDE not in own:
            return y
        return dora.rescale_rows(y, own[dora.MAGNITUDE], weight, own[A], own[B], scales[name])

    return apply


def split_by_block(blocks: Sequence[str], values: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """One dict per block from the part of the key after the block's name, and the keys that belong to no block."""
    found: dict[str, dict[str, Any]] = {block: {} for block in blocks}
    unknown = []
    # Each key is looked at once: the device has no work while a step begins.
    for key, value in values.items():
        end = key.find(".")
        while end >= 0 and key[:end] not in found:
            end = key.find(".", end + 1)
        if end < 0:
            unknown.append(key)
        else:
            found[key[:end]][key[end + 1 :]] = value
    return list(found.values()), unknown


def arrays_of_linear(adapters: Mapping[str, mx.array], name: str) -> Arrays:
    # By suffix; empty if the Linear has no adapter.
    return {suffix: adapters[name + suffix] for suffix in SUFFIXES if name + suffix in adapters}


def linear_shape(arrays: Mapping[str, mx.array]) -> tuple[int, int]:
    """(outputs, inputs)."""
    if full.DIFF in arrays:
        outputs, inputs = arrays[full.DIFF].shape
        return outputs, inputs
    if A in arrays:
        return arrays[B].shape[0], arrays[A].shape[1]
    (a, b), (c, d) = arrays[lokr.W1].shape, lokr.second_factor_shape(arrays)
    return a * c, b * d


def largest_change(adapters: Mapping[str, mx.array]) -> mx.array:
    """Largest absolute value of the arrays that start at zero: 0 before the first update. Lazy."""
    return mx.max(mx.stack([mx.max(mx.abs(value)) for name, value in adapters.items() if name.endswith(ZERO_AT_START)]))
