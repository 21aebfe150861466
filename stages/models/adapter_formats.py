"""A LoRA's names and arrays in the formats of the field: ours, diffusers', the fused names of the FLUX.2 reference, kohya's.

Ours: `<linear>.lora_A.weight` (R, I) and `<linear>.lora_B.weight` (O, R) under diffusers' names of the linears, and one
scale per linear: delta W = scale * B A, scale = alpha / R.

Dimensions: R rank, I inputs of the linear, O outputs.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models import convert, weights

A, B = ".lora_A.weight", ".lora_B.weight"
_HALVES_SWAPPED = "final_layer.adaLN_modulation.1"  # rows are shift, scale; in diffusers scale, shift


def _reference() -> dict[str, tuple[str, ...]]:
    """A linear of the reference layout -> the diffusers linears whose rows it stacks, in order; {} is the block's number."""
    double, single = "transformer_blocks.{}.", "single_transformer_blocks.{}."
    found: dict[str, tuple[str, ...]] = {name: (ours,) for name, ours in convert.TRANSFORMER.items()}
    found[_HALVES_SWAPPED] = ("norm_out.linear",)
    found |= {f"double_blocks.{{}}.{n}": tuple(double + p for p in parts) for n, parts in convert.FUSED.items()}
    found |= {f"double_blocks.{{}}.{n}": (double + p,) for n, p in convert.DOUBLE.items() if "norm" not in n}
    return found | {f"single_blocks.{{}}.{n}": (single + p,) for n, p in convert.SINGLE.items() if "norm" not in n}


FUSED = _reference()
_FUSED_OF = {part: fused for fused, parts in FUSED.items() for part in parts}
_FUSED_OF_KOHYA = {fused.replace(".", "_"): fused for fused in FUSED}
_PREFIXES = ("base_model.model.", "diffusion_model.", "transformer.")
_ENDINGS = {A: A, B: B, ".lora_down.weight": A, ".lora_up.weight": B}

Arrays = dict[str, mx.array]
Scales = dict[str, float]


def linears(arrays: Arrays) -> list[str]:
    """The names of the adapted linears, in order; an adapter with half a pair or two ranks in a pair is an error."""
    names = sorted({key.removesuffix(A).removesuffix(B) for key in arrays}, key=_natural)
    for name in names:
        for key in (name + A, name + B):
            if key not in arrays:
                raise ValueError(f"the adapter lacks {key}, though it has the other half of the pair")
        shape_a, shape_b = arrays[name + A].shape, arrays[name + B].shape
        if len(shape_a) != 2 or len(shape_b) != 2 or shape_a[0] != shape_b[1]:
            raise ValueError(f"{name}: lora_A {tuple(shape_a)} and lora_B {tuple(shape_b)} do not fit together")
    return names


def to_diffusers(arrays: Arrays, scales: Scales) -> Arrays:
    """`transformer.<name>.lora_A/B.weight`, the scale folded into B, so that also a reader without metadata is right."""
    out = {}
    for name in linears(arrays):
        out[f"transformer.{name}{A}"] = arrays[name + A]
        out[f"transformer.{name}{B}"] = _times(arrays[name + B], scales[name])
    return out


def to_fused(arrays: Arrays, scales: Scales) -> Arrays:
    """`diffusion_model.<reference name>.lora_A/B.weight`, exact: A's rows stacked, B block-diagonal, the scale folded into B."""
    groups: dict[str, None] = {}
    for name in linears(arrays):
        pattern, block = _numbered(name)
        if pattern not in _FUSED_OF:
            raise ValueError(f"{name} has no counterpart in the FLUX.2 reference layout; export it as diffusers")
        groups[_FUSED_OF[pattern].replace("{}", block)] = None
    out = {}
    for fused in groups:
        pattern, block = _numbered(fused)
        parts = [part.replace("{}", block) for part in FUSED[pattern]]
        scaled = {p: _times(arrays[p + B], scales[p]) for p in parts if p + B in arrays}
        out[f"diffusion_model.{fused}{A}"] = mx.concatenate([arrays[p + A] for p in scaled])
        b_OR = _block_diagonal([scaled.get(p) for p in parts])
        out[f"diffusion_model.{fused}{B}"] = _swap_halves(b_OR) if fused == _HALVES_SWAPPED else b_OR
    return out


def read_adapter(path: Path) -> tuple[Arrays, Scales]:
    """A LoRA file in any of the formats above, as float32 arrays in our names, and the scale of each linear.

    Fused q, k, v rows become three linears that share A, or get their own back if B is block-diagonal.
    A key that belongs to no plain LoRA (DoRA, LoKr, a text encoder's) is an error.
    """
    arrays, metadata = load(path)
    pairs: Arrays = {}
    alphas: Scales = {}
    for key in sorted(arrays):
        name, ending = _our_name(key)
        if ending == ".alpha":
            alphas[name] = float(np.array(arrays[key].astype(mx.float32)).item())
        else:
            pairs[name + ending] = arrays[key].astype(mx.float32)
    bare = not any(key.startswith((*_PREFIXES, "lora_unet_")) for key in arrays)
    if alphas:
        metadata = {"alphas": json.dumps(alphas)}
    elif not bare:
        metadata = _from_peft(metadata, linears(pairs), pairs)
    return _unfuse(pairs, _scales(pairs, metadata))


def load(path: Path) -> tuple[Arrays, dict[str, str]]:
    """The arrays and the metadata of a safetensors file; a missing, foreign or shortened file is one clear line."""
    if not path.is_file():
        raise ValueError(f"no adapter at {path}")
    weights.header(path)  # compares the file's size with its header, which MLX does not
    loaded: Any = mx.load(str(path), return_metadata=True)
    arrays, metadata = loaded
    return arrays, metadata


def _our_name(key: str) -> tuple[str, str]:
    """A file's key -> name of the linear (maybe fused), and `.lora_A.weight`, `.lora_B.weight` or `.alpha`."""
    for ending in (*_ENDINGS, ".alpha"):
        if key.endswith(ending):
            name = key.removesuffix(ending)
            break
    else:
        raise ValueError(f"{key} is not part of a plain LoRA; lora_A, lora_B, lora_down, lora_up and alpha are read")
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    if name.startswith("lora_unet_"):
        numbered = re.sub(r"_(\d+)_", "_{}_", name.removeprefix("lora_unet_"), count=1)
        if numbered not in _FUSED_OF_KOHYA:
            raise ValueError(f"{key} names no linear of FLUX.2; is the adapter one of another model?")
        block = re.search(r"_(\d+)_", name)
        name = _FUSED_OF_KOHYA[numbered].replace("{}", block.group(1) if block else "")
    return name, _ENDINGS.get(ending, ending)


def _scales(pairs: Arrays, metadata: dict[str, str]) -> Scales:
    """alpha / rank of each linear: `alphas` by name, then `alpha` of all; without either, 1."""
    alphas = json.loads(metadata.get("alphas", "{}"))
    every = metadata.get("alpha")
    ranks = {name: pairs[name + A].shape[0] for name in linears(pairs)}
    return {name: float(alphas.get(name, every if every is not None else r)) / r for name, r in ranks.items()}


def _from_peft(metadata: dict[str, str], names: list[str], pairs: Arrays) -> dict[str, str]:
    """What diffusers keeps in `lora_adapter_metadata`, as our `alphas`. Patterns are regular expressions, as PEFT reads them."""
    kept = json.loads(metadata.get("lora_adapter_metadata") or "{}")
    config = {key.removeprefix("transformer."): value for key, value in kept.items()}
    if config.get("use_dora"):
        raise ValueError("the adapter is a DoRA; only plain LoRA is read")
    alphas = {}
    for name in names:
        patterns = config.get("alpha_pattern") or {}
        found = [value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)]
        rank = pairs[name + A].shape[0]
        alpha = (found or [config.get("lora_alpha", rank)])[0]
        alphas[name] = alpha * math.sqrt(rank) if config.get("use_rslora") else alpha
    return {"alphas": json.dumps(alphas)}


def _unfuse(pairs: Arrays, scales: Scales) -> tuple[Arrays, Scales]:
    """Linears of the reference layout taken apart into diffusers' linears; others stay as they are."""
    arrays: Arrays = {}
    taken: Scales = {}
    for name in linears(pairs):
        pattern, block = _numbered(name)
        parts = [part.replace("{}", block) for part in FUSED.get(pattern, (name,))]
        a_RI, b_OR = pairs[name + A], pairs[name + B]
        if name == _HALVES_SWAPPED:
            b_OR = _swap_halves(b_OR)
        for part, (a, b) in zip(parts, _split(a_RI, b_OR, len(parts)), strict=True):
            arrays[part + A], arrays[part + B], taken[part] = a, b, scales[name]
    return arrays, taken


def _split(a_RI: mx.array, b_OR: mx.array, n: int) -> list[tuple[mx.array, mx.array]]:
    """n pairs for n equal groups of B's rows; without the other groups' zero columns if B is block-diagonal."""
    rows = mx.split(b_OR, n)
    if n == 1 or a_RI.shape[0] % n:
        return [(a_RI, b) for b in rows]
    blocks = [mx.split(b, n, axis=1)[i] for i, b in enumerate(rows)]
    if not mx.array_equal(b_OR, _block_diagonal(list(blocks))).item():
        return [(a_RI, b) for b in rows]
    return list(zip(mx.split(a_RI, n), blocks, strict=True))


def _block_diagonal(blocks: list[mx.array | None]) -> mx.array:
    """The blocks down the diagonal; None stands for rows of zeros (a linear without an adapter)."""
    present = [b for b in blocks if b is not None]
    ranks, outputs = [b.shape[1] for b in present], {b.shape[0] for b in present}
    if len(blocks) > 1 and len(outputs) != 1:
        raise ValueError(f"q, k and v of one attention have different sizes: {sorted(outputs)}")
    rows, before = [], 0
    for b in blocks:
        if b is None:
            rows.append(mx.zeros((present[0].shape[0], sum(ranks)), present[0].dtype))
            continue
        after = sum(ranks) - before - b.shape[1]
        rows.append(mx.pad(b, [(0, 0), (before, after)]))
        before += b.shape[1]
    return mx.concatenate(rows)


def _times(b_OR: mx.array, scale: float) -> mx.array:
    return b_OR.astype(mx.float32) * scale


def _swap_halves(b_OR: mx.array) -> mx.array:
    first, second = mx.split(b_OR, 2)
    return mx.concatenate([second, first])


def _numbered(name: str) -> tuple[str, str]:
    """`a.3.b` -> (`a.{}.b`, `3`): the first number between dots is the block's."""
    found = re.search(r"\.(\d+)\.", name)
    return re.sub(r"\.(\d+)\.", ".{}.", name, count=1), found.group(1) if found else ""


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts block 2 before block 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
