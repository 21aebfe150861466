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
    """(arrays in float32, scale of each Linear times `strength`). `linears`: name -> (outputs, inputs) of the model.

    Raises ValueError if the file is damaged or does not fit the model, or if `strength` is not 1 and the adapter uses DoRA.
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
    """From "scales" of the header, or alpha / rank; 1 for a Linear without a rank."""
    if "scales" in metadata:
        listed = json.loads(metadata["scales"])
        return {name: float(listed[name]) for name in linears}
    if "alpha" not in metadata:
        raise ValueError("the header has no alpha: is it an adapter that this program trained?")
    ranks = adapters.ranks(arrays)
    return {name: float(metadata["alpha"]) / ranks[name] if name in ranks else 1.0 for name in linears}


def _check_linears(metadata: Mapping[str, str], scales: Mapping[str, float]) -> None:
    missing = [name for name in json.loads(metadata.get("linears", "[]")) if name not in scales]
    if missing:
        raise ValueError(f"the file lacks the arrays of {missing[0]} ({len(missing)} of its Linears); fetch it again")


def merge_all(weights: Mapping[str, mx.array], arrays: Arrays, scales: Mapping[str, float]) -> Arrays:
    """All weights of the encoder in float32, with the adapter merged in."""
    merged: Arrays = {}
    done = set()
    for key, weight in weights.items():
        name = key.removesuffix(".weight")
        wide = weight.astype(mx.float32)
        if name in scales:
            wide = merge(wide, lora.arrays_of_linear(arrays, name), scales[name])
            done.add(name)
        merged[key] = wide
    # Another program merged 14 of 24 Linears in silence, since B came before A in its file.
    assert done == set(scales), f"{len(scales) - len(done)} of {len(scales)} Linears were not merged"
    return merged
