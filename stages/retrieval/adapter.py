"""Read a trained adapter file of a retriever, and merge it into the weights of its base. An adapter that cannot be used
completely is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from stages.models import adapters
from stages.models.weights import read_file
from stages.tuner.adapters import dora, full, lora
from stages.tuner.adapters.merge import check_shapes, merge

Arrays = dict[str, mx.array]


def read_adapter(path: Path, linears: Mapping[str, tuple[int, int]], strength: float = 1.0) -> tuple[Arrays, dict[str, float]]:
    """Read the adapter file `path`, and return `(arrays, scales)`. `arrays` maps names to the adapter's arrays, in
    float32. `scales` maps the name of each Linear to the factor of the adapter's change. `linears` maps the names of
    the model's Linears to `(outputs, inputs)`. All scales are multiplied by `strength`; 1 is the whole change. Raises
    ValueError if the file is damaged or does not fit the model. Raises it too if `strength` is not 1 and the adapter
    uses DoRA.
    """
    arrays, metadata = read_file(path)
    arrays = {name: value.astype(mx.float32) for name, value in arrays.items()}
    whole = [name.removesuffix(full.DIFF) for name in arrays if name.endswith(full.DIFF)]
    try:
        low = adapters.linears({name: value for name, value in arrays.items() if not name.endswith(full.DIFF)})
        scales = dict.fromkeys(whole, 1.0) | _scales(metadata, arrays, low)
        _check_linears(metadata, scales)
        check_shapes({f"{name}.weight": shape for name, shape in linears.items()}, arrays, scales)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path}: {error}") from None
    if name := adapters.first_not_finite(arrays):
        raise ValueError(f"{path}: {name} holds values that are not finite; choose an earlier checkpoint")
    if strength != 1 and any(name.endswith(dora.MAGNITUDE) for name in arrays):
        raise ValueError(f"vectors.strength must be 1 for an adapter with DoRA, got {strength:g}: its change has no scale")
    return arrays, {name: strength * scale for name, scale in scales.items()}


def _scales(metadata: Mapping[str, str], arrays: Arrays, linears: list[str]) -> dict[str, float]:
    """Return a dict from each name in `linears` to its scale. A scale is the factor of the adapter's change to a
    Linear. `metadata` is the header of the adapter file. `arrays` maps names such as "<linear>.lora_A.weight" to the
    adapter's arrays. If the header has "scales", they are returned. If it has not, a scale is "alpha" of the header
    divided by the rank of the Linear. A Linear without a rank has the scale 1. Raises ValueError if the header has
    neither "scales" nor "alpha".
    """
    if "scales" in metadata:
        listed = json.loads(metadata["scales"])
        return {name: float(listed[name]) for name in linears}
    if "alpha" not in metadata:
        raise ValueError("the header has no alpha: is it an adapter that this program trained?")
    ranks = adapters.ranks(arrays)
    return {name: float(metadata["alpha"]) / ranks[name] if name in ranks else 1.0 for name in linears}


def _check_linears(metadata: Mapping[str, str], scales: Mapping[str, float]) -> None:
    """Raise ValueError if an adapter file lacks a Linear that its header lists under "linears". `metadata` is the
    header. `scales` maps each Linear in the file to its scale.
    """
    missing = [name for name in json.loads(metadata.get("linears", "[]")) if name not in scales]
    if missing:
        raise ValueError(f"the file lacks the arrays of {missing[0]} ({len(missing)} of its Linears); fetch it again")


def merge_all(weights: Mapping[str, mx.array], arrays: Arrays, scales: Mapping[str, float]) -> Arrays:
    """Return all weights of an encoder with an adapter merged into them, in float32. `weights` maps the names of the
    encoder's weights to arrays. `arrays` maps names such as "<linear>.lora_A.weight" to the adapter's arrays. `scales`
    maps the name of each Linear with an adapter to the factor of the adapter's change.

    Raises AssertionError if the encoder lacks the weight of a Linear in `scales`.
    """
    merged: Arrays = {}
    done = set()
    for key, weight in weights.items():
        name = key.removesuffix(".weight")
        wide = weight.astype(mx.float32)
        if name in scales:
            wide = merge(wide, lora.arrays_of_linear(arrays, name), scales[name])
            done.add(name)
        merged[key] = wide
    assert done == set(scales), f"{len(scales) - len(done)} of {len(scales)} Linears were not merged"
    return merged
