"""Adapters of FLUX.2 read from the files of this program, diffusers, ComfyUI, kohya and LyCORIS.

R rank, I inputs of a Linear, O outputs.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models import weights
from stages.models.adapters import (
    ALPHA,
    MAGNITUDE,
    W1,
    W1_A,
    W1_B,
    W2_B,
    A,
    Arrays,
    B,
    Scales,
    linear_name,
    linears,
    of_linear,
    variant,
)
from stages.models.flux2 import adapter_names as names
from stages.models.flux2.adapter_writer import block_diagonal, swap_halves


def read_adapter(path: Path) -> tuple[Arrays, Scales]:
    """Read an adapter in any known format: (float32 arrays by "<diffusers Linear><ending>", scale of each Linear).
    A fused q, k, v becomes three Linears that share A, or that get their own A back if B is block-diagonal. ValueError if the
    file is missing or damaged, if it holds anything else (a text encoder's arrays, say), or if a fused adapter cannot be taken
    apart exactly.
    """
    if not path.is_file():
        raise ValueError(f"no adapter at {path}")
    arrays, metadata = weights.read_file(path)
    found: Arrays = {}
    alphas: Scales = {}
    for key in sorted(arrays):
        name, ending = names.parse_key(key)
        wide = arrays[key].astype(mx.float32)
        if ending == ALPHA:
            alphas[name] = float(np.array(wide).item())
        else:
            found[name + ending] = _as_vector(key, wide) if ending == MAGNITUDE else wide
    if alphas:
        metadata = {"alphas": json.dumps(alphas)}
    elif any(names.has_prefix(key) for key in arrays):
        metadata = _from_peft(metadata, found)
    scales = _scales(found, metadata)
    return _unfuse(_multiply_w1(found), scales)


def _as_vector(key: str, magnitude: mx.array) -> mx.array:
    """Return a magnitude of shape (O,) or (O,1) as (O,). ValueError for another shape."""
    if magnitude.ndim > 2 or (magnitude.ndim == 2 and magnitude.shape[1] != 1):
        raise ValueError(f"{key} of shape {magnitude.shape} sets the lengths of columns; only a DoRA of rows is read")
    return magnitude.flatten()


def _multiply_w1(found: Arrays) -> Arrays:
    """Replace a first LoKr factor that is given by two matrices of low rank by their product."""
    pairs = [key.removesuffix(W1_A) for key in found if key.endswith(W1_A) and key.removesuffix(W1_A) + W1_B in found]
    products = {name + W1: found[name + W1_A] @ found[name + W1_B] for name in pairs}
    return {key: value for key, value in found.items() if not key.endswith((W1_A, W1_B))} | products


def _ranks(found: Arrays) -> dict[str, int | None]:
    """Return the rank of each Linear's adapter by its name; None for a LoKr of two full factors."""
    ranks: dict[str, int | None] = {linear_name(key): None for key in found}
    for ending in (W1_B, W2_B, A):  # a later ending replaces the rank of an earlier one
        ranks |= {key.removesuffix(ending): value.shape[0] for key, value in found.items() if key.endswith(ending)}
    return ranks


def _scales(found: Arrays, metadata: dict[str, str]) -> Scales:
    """Return the scale of each Linear's adapter.
    It is metadata `scales` by name; else alpha / rank, alpha being metadata `alphas` by name, or `alpha` for all; else 1.
    """
    by_name, alphas = (json.loads(metadata.get(key, "{}")) for key in ("scales", "alphas"))
    common = metadata.get("alpha")
    scales = {}
    for name, rank in _ranks(found).items():
        alpha = alphas.get(name, common if common is not None else rank)
        scales[name] = float(by_name.get(name, float(alpha) / rank if rank else 1.0))
    return scales


def _from_peft(metadata: dict[str, str], found: Arrays) -> dict[str, str]:
    """Turn the LoraConfig that diffusers writes as `lora_adapter_metadata` into metadata with our `scales`."""
    stored = json.loads(metadata.get("lora_adapter_metadata") or "{}")
    config = {key.removeprefix("transformer."): value for key, value in stored.items()}
    if config.get("use_dora") and variant(found) != "dora":
        raise ValueError("the adapter says that it is a DoRA, but its file lacks the magnitudes")
    scales = {}
    for name, own_rank in _ranks(found).items():
        rank = own_rank or _by_pattern(config, "rank_pattern", name, config.get("r"))
        if rank:
            alpha = _by_pattern(config, "alpha_pattern", name, config.get("lora_alpha", config.get("alpha", rank)))
            scales[name] = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return {"scales": json.dumps(scales)}


def _by_pattern(config: dict[str, Any], key: str, name: str, otherwise: Any) -> Any:
    """Return the value of the first pattern in config[key] that matches the end of `name`: a regular expression, as in PEFT."""
    patterns = config.get(key) or {}
    return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", name)), otherwise)


def _unfuse(found: Arrays, scales: Scales) -> tuple[Arrays, Scales]:
    """Split adapters of the reference repository's Linears into adapters of diffusers' Linears; keep the others."""
    arrays: Arrays = {}
    own_scales: Scales = {}
    for name in linears(found):
        parts, own = names.diffusers_names(name), of_linear(found, name)
        if name == names.HALVES_SWAPPED:
            own = {ending: swap_halves(value) if ending in (B, MAGNITUDE, W1) else value for ending, value in own.items()}
        for part, part_arrays in zip(parts, _split(name, own, len(parts)), strict=True):
            arrays |= {part + ending: value for ending, value in part_arrays.items()}
            own_scales[part] = scales[name]
    return arrays, own_scales


def _split(name: str, own: Arrays, n: int) -> list[Arrays]:
    """Split the arrays of one Linear into those of `n` Linears, each of which has an equal share of its rows, in order."""
    if n == 1:
        return [own]
    if W1 in own:
        if own[W1].shape[0] % n:
            raise ValueError(f"{name}: a LoKr of q, k and v in one, w1 of {own[W1].shape[0]} rows, cannot be taken apart exactly")
        return [{**own, W1: w1} for w1 in mx.split(own[W1], n)]
    pairs = [{A: a_RI, B: b_OR} for a_RI, b_OR in _split_pair(own[A], own[B], n)]
    if MAGNITUDE not in own:
        return pairs
    return [{**pair, MAGNITUDE: m} for pair, m in zip(pairs, mx.split(own[MAGNITUDE], n), strict=True)]


def _split_pair(a_RI: mx.array, b_OR: mx.array, n: int) -> list[tuple[mx.array, mx.array]]:
    """Split one LoRA into `n`, for equal groups of B's rows. If B is block-diagonal, each gets its own rows of A alone."""
    rows = mx.split(b_OR, n)
    if a_RI.shape[0] % n:
        return [(a_RI, b) for b in rows]
    blocks = [mx.split(b, n, axis=1)[i] for i, b in enumerate(rows)]
    if not mx.array_equal(b_OR, block_diagonal(list(blocks))).item():
        return [(a_RI, b) for b in rows]
    return list(zip(mx.split(a_RI, n), blocks, strict=True))
