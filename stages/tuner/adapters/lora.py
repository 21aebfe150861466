"""The arrays of an adapter and what they add to a frozen Linear. Hu et al. 2021, arXiv 2106.09685.

LoRA computes y = x W^T + scale (x A^T) B^T with A of shape (rank, inputs) and B of shape (outputs, rank). DoRA adds a
magnitude per output (dora.py). LoKr replaces B A by a Kronecker product (lokr.py), and full training by one whole matrix
(full.py).

An adapter is a flat dict of float32 arrays named "<linear><suffix>". The suffixes that a Linear has give its variant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from stages import kernels
from stages.tuner.adapters import dora, full, lokr
from stages.tuner.adapters.product import product, scaled

Arrays = dict[str, mx.array]
Linear = Callable[[str, Any, mx.array], mx.array]  # (name within the block, weight, x) -> y

A, B = ".lora_A.weight", ".lora_B.weight"
SUFFIXES = (A, B, dora.MAGNITUDE, lokr.W1, lokr.W2, lokr.W2_A, lokr.W2_B, full.DIFF)
ZERO_AT_START = (B, lokr.W2, lokr.W2_B, full.DIFF)  # arrays that start at zero, so that a fresh adapter changes nothing


def adapted_linear(adapters: Mapping[str, mx.array], scales: Mapping[str, float]) -> Linear:
    """Return a function (name, weight, x) -> y that computes the Linears of one block with their adapters. `adapters` maps
    "<linear><suffix>", such as "attn.to_q.lora_A.weight", to arrays. `scales` maps "<linear>" to the factor that multiplies the
    adapter's change. All names are within the block. y has the dtype of x. For a Linear without an adapter, y is x W^T, where W
    is `weight`.
    """

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
    """Divide a dict whose keys begin with block names into one dict per block. The keys of `values` are "<block>.<name>".
    `blocks` are the names of the model's blocks. Return two lists: the dicts from "<name>" to value, in the order of
    `blocks`, and the keys that belong to no block.

    Each key is looked at once: the device has no work while a step begins.
    """
    found: dict[str, dict[str, Any]] = {block: {} for block in blocks}
    unknown = []
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
    """Return the adapter's arrays for the Linear `name`, as suffix -> array. The keys for LoRA are ".lora_A.weight" and
    ".lora_B.weight". `adapters` maps "<linear><suffix>" to arrays. The result is empty if the Linear has no adapter.
    """
    return {suffix: adapters[name + suffix] for suffix in SUFFIXES if name + suffix in adapters}


def linear_shape(arrays: Mapping[str, mx.array]) -> tuple[int, int]:
    """Return the shape (outputs, inputs) of the Linear that an adapter's arrays belong to. `arrays` maps suffixes, such as
    ".lora_A.weight", to the arrays of this Linear.
    """
    if full.DIFF in arrays:
        outputs, inputs = arrays[full.DIFF].shape
        return outputs, inputs
    if A in arrays:
        return arrays[B].shape[0], arrays[A].shape[1]
    (a, b), (c, d) = arrays[lokr.W1].shape, lokr.second_factor_shape(arrays)
    return a * c, b * d


def largest_change(adapters: Mapping[str, mx.array]) -> mx.array:
    """Return a measure of how far training has changed an adapter, as a lazy scalar array. It is the largest absolute
    value in those arrays that start at zero. It is 0 before the first update. `adapters` maps "<linear><suffix>" to
    arrays.

    These arrays are `B` of a LoRA, the second matrix of a LoKr, and the weight difference of full training.
    """
    return mx.max(mx.stack([mx.max(mx.abs(value)) for name, value in adapters.items() if name.endswith(ZERO_AT_START)]))
