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
    """Read the LoRA, DoRA or LoKr file at `path` and return (arrays, scales). `arrays` maps keys such as
    "proj_out.lora_A.weight" to float32 arrays. Such a key is a Linear's name in diffusers and an ending. `scales` maps
    each Linear's name to the factor of its update. Raises ValueError if the file is missing, damaged or cannot be read
    as an adapter.

    Files of this program, diffusers, ComfyUI, kohya and LyCORIS are understood. A file with other arrays, such as a
    text encoder's, cannot be read. Some files have one adapter for the Linear that fuses q, k and v. This adapter is
    split into three. A LoKr that cannot be split exactly gives a ValueError.
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
    """Return the magnitude of a DoRA, one number per output, in the shape (outputs,). `key` is its name in the file, for the
    message. `magnitude` has the shape (outputs,) or (outputs, 1). Raises ValueError for any other shape.
    """
    if magnitude.ndim > 2 or (magnitude.ndim == 2 and magnitude.shape[1] != 1):
        raise ValueError(f"{key} of shape {magnitude.shape} sets the lengths of columns; only a DoRA of rows is read")
    return magnitude.flatten()


def _multiply_w1(arrays: Arrays) -> Arrays:
    """Return a copy of `arrays` in which the first factor of every LoKr is one matrix. A LoKr is an adapter whose
    update is the Kronecker product of two factors. Some files store the first factor as two matrices, whose keys end in
    ".lokr_w1_a" and ".lokr_w1_b". Their matrix product replaces these two arrays. Its key ends in ".lokr_w1". All other
    arrays stay as they are. A key of `arrays` is the name of a Linear and an ending, such as "proj_out.lokr_w1".

    If one of the two matrices is missing, the other is left out.
    """
    pairs = [key.removesuffix(W1_A) for key in arrays if key.endswith(W1_A) and key.removesuffix(W1_A) + W1_B in arrays]
    products = {name + W1: arrays[name + W1_A] @ arrays[name + W1_B] for name in pairs}
    return {key: value for key, value in arrays.items() if not key.endswith((W1_A, W1_B))} | products


def _ranks(arrays: Arrays) -> dict[str, int | None]:
    """Return a dict from the name of each Linear in `arrays` to the rank of its adapter. The rank is None if no array
    of the adapter has low rank. Keys of `arrays` are the name of a Linear and an ending, such as
    "proj_out.lora_A.weight".
    """
    ranks: dict[str, int | None] = {linear_name(key): None for key in arrays}
    for ending in (W1_B, W2_B, A):  # a later ending replaces the rank of an earlier one
        ranks |= {key.removesuffix(ending): value.shape[0] for key, value in arrays.items() if key.endswith(ending)}
    return ranks


def _scales(arrays: Arrays, metadata: dict[str, str]) -> Scales:
    """Return the scale of the adapter of each Linear in `arrays`, as a dict from the Linear's name. Keys of `arrays`
    are a Linear's name and an ending. `metadata` is that of the adapter file. The scale in the metadata is used, if
    there is one. Otherwise it is alpha / rank. Without an alpha or a rank, it is 1.

    `metadata["scales"]` and `metadata["alphas"]` are JSON: dicts from a Linear's name to its scale or alpha.
    `metadata["alpha"]` is the alpha of all other Linears.
    """
    by_name, alphas = (json.loads(metadata.get(key, "{}")) for key in ("scales", "alphas"))
    common = metadata.get("alpha")
    scales = {}
    for name, rank in _ranks(arrays).items():
        alpha = alphas.get(name, common if common is not None else rank)
        scales[name] = float(by_name.get(name, float(alpha) / rank if rank else 1.0))
    return scales


def _from_peft(metadata: dict[str, str], arrays: Arrays) -> dict[str, str]:
    """Return `{"scales": text}` for an adapter in PEFT's format. `text` is JSON, from the name of each Linear to its
    scale. The scales follow from the PEFT config in `metadata["lora_adapter_metadata"]`. `arrays` maps keys such as
    "proj_out.lora_A.weight" to arrays. Raises ValueError for a DoRA without magnitudes.

    A scale is alpha / rank, or alpha / sqrt(rank) with rsLoRA. Without an alpha, alpha is the rank. A Linear without a
    rank is left out.
    """
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
    """Return the value for the Linear `name` from the dict `config[key]`. The keys of this dict are regular
    expressions. The first one that matches the end of `name` is used, which is PEFT's rule. If none matches, or if
    `config` has no such dict, return `otherwise`.
    """
    patterns = config.get(key) or {}
    return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", name)), otherwise)


def _unfuse(arrays: Arrays, scales: Scales) -> tuple[Arrays, Scales]:
    """Rename the Linears of an adapter to diffusers' names and return new (arrays, scales). The adapter of a Linear that fuses q,
    k and v is split into three. `arrays` maps keys such as "proj_out.lora_A.weight" to arrays. `scales` maps the name of each
    Linear to the factor of its update.
    """
    split: Arrays = {}
    own_scales: Scales = {}
    for name in linears(arrays):
        parts, own = names.diffusers_names(name), of_linear(arrays, name)
        if name == names.HALVES_SWAPPED:
            own = {ending: swap_halves(value) if ending in (B, MAGNITUDE, W1) else value for ending, value in own.items()}
        for part, part_arrays in zip(parts, _split_linear(name, own, len(parts)), strict=True):
            split |= {part + ending: value for ending, value in part_arrays.items()}
            own_scales[part] = scales[name]
    return split, own_scales


def _split_linear(name: str, own: Arrays, count: int) -> list[Arrays]:
    """Split the adapter of one Linear into adapters for `count` smaller Linears. For example, an adapter of q, k and v
    in one gives a list of three. The outputs of the Linear are divided equally, in order. `name` is the Linear's name,
    for the error message. `own` and each returned dict map endings, such as ".lora_A.weight", to arrays.

    Raises ValueError for a LoKr that cannot be split exactly.
    """
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
    """Split one LoRA into a list of `count` LoRAs, each (A, B). Each has an equal share of B's rows. a_RI is the matrix A, (rank,
    inputs). b_OR is the matrix B, (outputs, rank). If B is block-diagonal, each LoRA gets only its own rows of A. Otherwise each
    gets the whole A.
    """
    rows = mx.split(b_OR, count)
    if a_RI.shape[0] % count:
        return [(a_RI, b) for b in rows]
    blocks = [mx.split(b, count, axis=1)[i] for i, b in enumerate(rows)]
    if not mx.array_equal(b_OR, block_diagonal(list(blocks))).item():
        return [(a_RI, b) for b in rows]
    return list(zip(mx.split(a_RI, count), blocks, strict=True))
