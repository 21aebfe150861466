"""How an adapter starts: fresh, so that it changes nothing, or with the arrays of another adapter."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from stages.tuner import draws, quantize
from stages.tuner.adapters import dora, full, lokr, lora
from stages.tuner.adapters.lora import Arrays
from stages.tuner.adapters.targets import Target
from stages.tuner.stored import read

RANK_AXIS = {lora.A: 0, lora.B: 1, lokr.W2_A: 1, lokr.W2_B: 0}  # the axis of length rank, by suffix


def target_weights(blocks: Iterable[Any], targets: Iterable[Target]) -> dict[str, quantize.Weight]:
    every = {f"{block.name}.{name}": weight for block in blocks for name, weight in block.weights.items()}
    return {target.name: every[f"{target.name}.weight"] for target in targets}


def fresh_adapter(targets: Iterable[Target], seed: int, weights: Mapping[str, quantize.Weight] | None = None) -> Arrays:
    """Float32 arrays that change nothing yet; random values depend only on seed, key and shape. Only DoRA needs `weights`."""
    arrays: Arrays = {}
    for target in targets:
        for suffix, shape in target.shapes.items():
            if suffix == dora.MAGNITUDE:
                assert weights is not None, "DoRA's magnitudes start as the norms of the weights' rows"
                arrays[target.name + suffix] = dora.initial_magnitude(read(weights[target.name]), target.outputs, target.inputs)
                mx.eval(arrays[target.name + suffix])  # one weight in float32 at a time
            elif suffix in lora.ZERO_AT_START:
                arrays[target.name + suffix] = mx.zeros(shape, mx.float32)
            else:
                arrays[target.name + suffix] = _uniform(seed, target.name, suffix, shape)
    return arrays


def _uniform(seed: int, name: str, suffix: str, shape: tuple[int, ...]) -> mx.array:
    purpose = f"init {name}" if suffix == lora.A else f"init {name}{suffix}"
    unit = draws.generator(seed, purpose).random(shape, dtype=np.float32)
    # Within 1 / sqrt(columns): Kaiming's bound with a = sqrt(5), as in PEFT and LyCORIS.
    return mx.array((2 * unit - 1) * np.float32(1 / math.sqrt(shape[1])))


def start_from_adapter(
    source: Mapping[str, mx.array],
    scales: Mapping[str, float],
    targets: Iterable[Target],
    fresh: Mapping[str, mx.array],
    weights: Mapping[str, quantize.Weight] | None = None,
) -> Arrays:
    """Arrays that change the model as `source` does, up to rounding; what it lacks comes from `fresh`. Raises ValueError."""
    chosen = list(targets)
    check_initial(source, scales, chosen)
    arrays: Arrays = {}
    for target in chosen:
        name, own = target.name, lora.arrays_of_linear(fresh, target.name)
        if name in scales:
            own |= _resized(target, lora.arrays_of_linear(source, name), scales[name], own)
            if target.variant == "dora" and name + dora.MAGNITUDE not in source:
                assert weights is not None, "the magnitudes of a LoRA are the row norms of its adapted weights"
                own[dora.MAGNITUDE] = dora.row_norms(read(weights[name]), own[lora.A], own[lora.B], target.scale)
                mx.eval(own[dora.MAGNITUDE])
        arrays |= {name + suffix: value.astype(mx.float32) for suffix, value in own.items()}
    return arrays


def check_initial(source: Mapping[str, mx.array], scales: Mapping[str, float], targets: Iterable[Target]) -> None:
    """Raises ValueError unless `source` can start `targets`: same variant and shapes, no larger rank, finite values."""
    chosen = {target.name: target for target in targets}
    for name in scales:
        if name not in chosen:
            near = "".join(f"; nearest: {close}" for close in difflib.get_close_matches(name, chosen, n=1))
            raise ValueError(f"the adapter has {name}, which is not a target: add it to the targets{near}")
        arrays = lora.arrays_of_linear(source, name)
        _check_linear(chosen[name], arrays)
        for suffix, value in arrays.items():
            _check_array(chosen[name], suffix, value.shape)
    for name, value in source.items():
        if not mx.all(mx.isfinite(value)).item():
            raise ValueError(f"the adapter's {name} has values that are not finite: choose an earlier checkpoint")


def _check_linear(target: Target, arrays: Arrays) -> None:
    given = {*arrays} if target.variant != "dora" else {*arrays, dora.MAGNITUDE}
    if given != {*target.shapes}:
        raise ValueError(f"the adapter of {target.name} must be {_variant(target.shapes)}, got {_variant(arrays)}")
    shape, expected = lora.linear_shape(arrays), (target.outputs, target.inputs)
    if shape != expected:
        raise ValueError(f"the adapter of {target.name} must be for shape {expected}, got {shape}: is it of another model?")


def _check_array(target: Target, suffix: str, shape: tuple[int, ...]) -> None:
    expected, rank_axis = target.shapes[suffix], RANK_AXIS.get(suffix)
    # A larger rank is refused: cutting it by singular values would give another adapter than the one that was named.
    if rank_axis is not None and shape[rank_axis] > expected[rank_axis]:
        most, rank = expected[rank_axis], shape[rank_axis]
        raise ValueError(f"the adapter of {target.name} must have a rank <= {most}, got {rank}: raise the rank to {rank}")
    if any(had != want for axis, (had, want) in enumerate(zip(shape, expected, strict=True)) if axis != rank_axis):
        remedy = "set the factor that it was trained with"
        raise ValueError(f"{suffix[1:]} of {target.name} must have the shape {expected}, got {tuple(shape)}: {remedy}")


def _resized(target: Target, arrays: Arrays, scale: float, fresh: Arrays) -> Arrays:
    resized = {}
    for suffix, value in arrays.items():
        # B, or LoKr's w2, takes the ratio of the scales, so that the change of the weight stays the same.
        ratio = scale / target.scale if suffix in lora.ZERO_AT_START else 1.0
        resized[suffix] = _filled_up(suffix, value.astype(mx.float32) * ratio, fresh[suffix])
    return resized


def _filled_up(suffix: str, value: mx.array, fresh: mx.array) -> mx.array:
    axis = RANK_AXIS.get(suffix)
    if axis is None or value.shape[axis] == fresh.shape[axis]:
        return value
    # What is filled in changes nothing yet: the fresh part of B, or of LoKr's w2_b, is zero.
    return mx.concatenate([value, mx.split(fresh, [value.shape[axis]], axis=axis)[1]], axis=axis)


def _variant(suffixes: Collection[str]) -> str:
    if full.DIFF in suffixes:
        return "a whole difference"
    if lokr.W1 in suffixes:
        return "a LoKr with a whole w2" if lokr.W2 in suffixes else "a LoKr with a low-rank w2"
    return "a DoRA" if dora.MAGNITUDE in suffixes else "a LoRA"
