"""Reads adapters of FLUX.2 of this program, diffusers, ComfyUI, kohya, LyCORIS. R rank, I inputs of a Linear, O outputs."""

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
    """(float32 arrays by diffusers' Linear and ending, scale of each Linear). An adapter of fused q, k and v is split into three.

    Raises ValueError if the file is missing or damaged, has other arrays (a text encoder's), or a LoKr cannot be split exactly.
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
    # Alphas as arrays (kohya, LyCORIS); else PEFT's config, if the keys have a prefix; else this program's metadata.
    if alphas:
        metadata = {"alphas": json.dumps(alphas)}
    elif any(names.has_prefix(key) for key in arrays):
        metadata = _from_peft(metadata, found)
    scales = _scales(found, metadata)
    return _unfuse(_multiply_w1(found), scales)


def _as_vector(key: str, magnitude: mx.array) -> mx.array:
    if magnitude.ndim > 2 or (magnitude.ndim == 2 and magnitude.shape[1] != 1):
        raise ValueError(f"{key} of shape {magnitude.shape} sets the lengths of columns; only a DoRA of rows is read")
    return magnitude.flatten()


def _multiply_w1(arrays: Arrays) -> Arrays:
    # A lone half is left out.
    pairs = [key.removesuffix(W1_A) for key in arrays if key.endswith(W1_A) and key.removesuffix(W1_A) + W1_B in arrays]
    products = {name + W1: arrays[name + W1_A] @ arrays[name + W1_B] for name in pairs}
    return {key: value for key, value in arrays.items() if not key.endswith((W1_A, W1_B))} | products


def _ranks(arrays: Arrays) -> dict[str, int | None]:
    ranks: dict[str, int | None] = {linear_name(key): None for key in arrays}
    for ending in (W1_B, W2_B, A):  # a later ending replaces the rank of an earlier one
        ranks |= {key.removesuffix(ending): value.shape[0] for key, value in arrays.items() if key.endswith(ending)}
    return ranks


def _scales(arrays: Arrays, metadata: dict[str, str]) -> Scales:
    # In the metadata, "scales" and "alphas" are JSON by Linear, and "alpha" is that of all others. A scale goes before an
    # alpha.
    by_name, alphas = (json.loads(metadata.get(key, "{}")) for key in ("scales", "alphas"))
    common = metadata.get("alpha")
    scales = {}
    for name, rank in _ranks(arrays).items():
        alpha = alphas.get(name, common if common is not None else rank)
        scales[name] = float(by_name.get(name, float(alpha) / rank if rank else 1.0))
    return scales


def _from_peft(metadata: dict[str, str], arrays: Arrays) -> dict[str, str]:
    """{"scales": JSON by Linear} from PEFT's config: alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
    stored = json.loads(metadata.get("lora_adapter_metadata") or "{}")
    config = {key.removeprefix("transformer."): value for key, value in stored.items()}
    if config.get("use_dora") and variant(arrays) != "dora":
        raise ValueError("the adapter says that it is a DoRA, but its file lacks the magnitudes")
    scales = {}
    for name, own_rank in _ranks(arrays).items():
        rank = own_rank or _by_pattern(config, "rank_pattern", name, config.get("r"))
        if rank:
            alpha = _by_pattern(config, "alpha_pattern", name, config.get("lora_alpha", config.get("alpha", rank)))
            scales[name] = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return {"scales": json.dumps(scales)}


def _by_pattern(config: dict[str, Any], key: str, name: str, otherwise: Any) -> Any:
    # PEFT's rule: the first pattern that matches the end of the name.
    patterns = config.get(key) or {}
    return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", name)), otherwise)


def _unfuse(arrays: Arrays, scales: Scales) -> tuple[Arrays, Scales]:
    split: Arrays = {}
    own_scales: Scales = {}
    for name in linears(arrays):
        parts, own = names.diffusers_names(name), of_linear(arrays, name)
        if name == names.HALVES_SWAPPED:
            # Rows of a Kronecker product follow its first factor, so that exchanging the halves of w1 is exact.
            own = {ending: swap_halves(value) if ending in (B, MAGNITUDE, W1) else value for ending, value in own.items()}
        for part, part_arrays in zip(parts, _split_linear(name, own, len(parts)), strict=True):
            split |= {part + ending: value for ending, value in part_arrays.items()}
            own_scales[part] = scales[name]
    return split, own_scales


def _split_linear(name: str, own: Arrays, count: int) -> list[Arrays]:
    """Adapters of `count` equal parts of a Linear's outputs. Raises ValueError for a LoKr that cannot be split exactly."""
    if count == 1:
        return [own]
    if W1 in own:
        if own[W1].shape[0] % count:
            raise ValueError(f"{name}: a LoKr of q, k and v in one, w1 of {own[W1].shape[0]} rows, cannot be taken apart exactly")
        return [{**own, W1: w1} for w1 in mx.split(own[W1], count)]
    pairs = [{A: a_RI, B: b_OR} for a_RI, b_OR in _split_pair(own[A], own[B], count)]
    if MAGNITUDE not in own:
        return pairs
    return [{**pair, MAGNITUDE: m} for pair, m in zip(pairs, mx.split(own[MAGNITUDE], count), strict=True)]


def _split_pair(a_RI: mx.array, b_OR: mx.array, count: int) -> list[tuple[mx.array, mx.array]]:
    rows = mx.split(b_OR, count)
    if a_RI.shape[0] % count:
        return [(a_RI, b) for b in rows]
    blocks = [mx.split(b, count, axis=1)[i] for i, b in enumerate(rows)]
    # A block-diagonal B, as `to_comfyui` makes it, uses only its own rows of A in each part.
    if not mx.array_equal(b_OR, block_diagonal(list(blocks))).item():
        return [(a_RI, b) for b in rows]
    return list(zip(mx.split(a_RI, count), blocks, strict=True))
