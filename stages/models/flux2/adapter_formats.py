"""Adapters read from files in the formats of the field, and turned into diffusers' and ComfyUI's. Names: adapter_names.py.

R rank, I inputs of a linear, O outputs.
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
from stages.models.flux2 import adapter_names as names
from stages.models.flux2.adapter_names import ALPHA, DORA_SCALE, MAGNITUDE, W1, W1_A, W1_B, W2, W2_A, W2_B, A, B

Arrays = dict[str, mx.array]
Scales = dict[str, float]


def linears(arrays: Arrays) -> list[str]:
    """The names of the adapted linears, in order; one with an array too few, or arrays that do not fit, is an error."""
    found = sorted({_name(key) for key in arrays}, key=names.natural)
    for name in found:
        own = of_linear(arrays, name)
        wanted = [W1, W2] if W2 in own else [W1, W2_A, W2_B] if {W1, W2_A, W2_B} & {*own} else [A, B]
        for ending in wanted:
            if ending not in own:
                raise ValueError(f"the adapter lacks {name}{ending}, though it has other arrays of {name}")
        if MAGNITUDE in own and W1 in own:
            raise ValueError(f"{name}: a LoKr with magnitudes is not read")
        first, second = own[wanted[-2]].shape, own[wanted[-1]].shape
        inner = (second[1], first[0]) if A in own else (first[1], second[0])
        if W2 not in own and inner[0] != inner[1]:
            shapes = f"{wanted[-2][1:]} {first} and {wanted[-1][1:]} {second}"
            raise ValueError(f"{name}: {shapes} do not fit together")
        if MAGNITUDE in own and own[MAGNITUDE].shape != second[:1]:
            raise ValueError(
                f"{name}: the magnitude of shape {own[MAGNITUDE].shape} is not one number for each of {second[0]} rows"
            )
    return found


def of_linear(arrays: Arrays, name: str) -> Arrays:
    """The arrays of one linear by their endings."""
    return {ending: arrays[name + ending] for ending in names.ENDINGS if name + ending in arrays}


def variant(arrays: Arrays) -> str:
    """lora, dora or lokr."""
    if any(key.endswith(W1) for key in arrays):
        return "lokr"
    return "dora" if any(key.endswith(MAGNITUDE) for key in arrays) else "lora"


def to_diffusers(arrays: Arrays, scales: Scales) -> Arrays:
    """`transformer.<name>` and our endings, which are PEFT's; the scale in B or w1: right also for a reader without metadata."""
    out: Arrays = {}
    for name in linears(arrays):
        out |= {f"transformer.{name}{ending}": value for ending, value in _scaled(arrays, scales, name).items()}
    return out


def to_comfyui(arrays: Arrays, scales: Scales) -> Arrays:
    """LoRA and DoRA: `diffusion_model.<reference name>`, q, k and v in one, exact: A's rows stacked, B block-diagonal, the scale
    in B, the magnitude as `.dora_scale` (O,1). LoKr, as q, k and v make no single Kronecker product: LyCORIS' names, `.alpha`.
    """
    groups = dict.fromkeys(names.fused_of(name) for name in linears(arrays))
    if variant(arrays) == "lokr":
        return _to_lycoris(arrays, scales)
    out = {}
    for fused in groups:
        parts = names.parts_of(fused)
        scaled = {part: _scaled(arrays, scales, part) for part in parts if part + B in arrays}
        out[f"diffusion_model.{fused}{A}"] = mx.concatenate([own[A] for own in scaled.values()])
        b_OR = _block_diagonal([scaled[part][B] if part in scaled else None for part in parts])
        out[f"diffusion_model.{fused}{B}"] = _swap_halves(b_OR) if fused == names.HALVES_SWAPPED else b_OR
        if any(MAGNITUDE in own for own in scaled.values()):
            out[f"diffusion_model.{fused}{DORA_SCALE}"] = _dora_scale(
                fused, [scaled.get(part, {}).get(MAGNITUDE) for part in parts]
            )
    return out


def _to_lycoris(arrays: Arrays, scales: Scales) -> Arrays:
    out: Arrays = {}
    for name in linears(arrays):
        own = of_linear(arrays, name)
        low = W2_B in own  # alpha / R holds for a low rank alone
        if not low:
            own[W1] = _times(own[W1], scales[name])
        alpha = mx.array(scales[name] * own[W2_B].shape[0] if low else 1.0, mx.float32)
        out |= {names.lycoris(name) + ending: value for ending, value in {**own, ALPHA: alpha}.items()}
    return out


def _scaled(arrays: Arrays, scales: Scales, name: str) -> Arrays:
    """One linear's arrays with the scale folded in."""
    own = of_linear(arrays, name)
    bearer = W1 if W1 in own else B
    return {**own, bearer: _times(own[bearer], scales[name])}


def _dora_scale(fused: str, magnitudes: list[mx.array | None]) -> mx.array:
    """The magnitudes of fused linears, (O,1): as a plain vector, ComfyUI would lay them along the inputs."""
    there = [magnitude for magnitude in magnitudes if magnitude is not None]
    if len(there) < len(magnitudes):
        raise ValueError(
            f"{fused}: a DoRA of some of q, k and v cannot be fused, the others' lengths are the base's; export as diffusers"
        )
    whole_O1 = mx.concatenate(there)[:, None]
    return _swap_halves(whole_O1) if fused == names.HALVES_SWAPPED else whole_O1


def read_adapter(path: Path) -> tuple[Arrays, Scales]:
    """An adapter's file in any of these formats, as float32 arrays in our names, and the scale of each linear.

    Fused q, k, v rows become three linears that share A, or get their own back if B is block-diagonal. An array of anything
    else (a text encoder's, a convolution's) is an error, and so is what cannot be taken apart exactly.
    """
    arrays, metadata = load(path)
    found: Arrays = {}
    alphas: Scales = {}
    for key in sorted(arrays):
        name, ending = names.our_name(key)
        wide = arrays[key].astype(mx.float32)
        if ending == ALPHA:
            alphas[name] = float(np.array(wide).item())
        else:
            found[name + ending] = _vector(key, wide) if ending == MAGNITUDE else wide
    if alphas:
        metadata = {"alphas": json.dumps(alphas)}
    elif not all(names.is_bare(key) for key in arrays):
        metadata = _from_peft(metadata, found)
    scales = _scales(found, metadata)
    return _unfuse(_joined(found), scales)


def load(path: Path) -> tuple[Arrays, dict[str, str]]:
    """The arrays and the metadata of a safetensors file; a missing, foreign or shortened file is one clear line."""
    if not path.is_file():
        raise ValueError(f"no adapter at {path}")
    weights.read_header(path)  # compares the file's size with its header, which MLX does not
    loaded: Any = mx.load(str(path), return_metadata=True)
    arrays, metadata = loaded
    return arrays, metadata


def _name(key: str) -> str:
    return names.our_name(key)[0]


def _vector(key: str, magnitude: mx.array) -> mx.array:
    """(O,) or (O,1) as (O,)."""
    if magnitude.ndim > 2 or (magnitude.ndim == 2 and magnitude.shape[1] != 1):
        raise ValueError(f"{key} of shape {magnitude.shape} sets the lengths of columns; only a DoRA of rows is read")
    return magnitude.flatten()


def _joined(found: Arrays) -> Arrays:
    """A w1 of low rank as its product."""
    pairs = [key.removesuffix(W1_A) for key in found if key.endswith(W1_A) and key.removesuffix(W1_A) + W1_B in found]
    made = {name + W1: found[name + W1_A] @ found[name + W1_B] for name in pairs}
    return {key: value for key, value in found.items() if not key.endswith((W1_A, W1_B))} | made


def _ranks(found: Arrays) -> dict[str, int | None]:
    """The rank of each linear's adapter; None for a LoKr of two whole factors."""
    ranks: dict[str, int | None] = {_name(key): None for key in found}
    for ending in (W1_B, W2_B, A):  # the later ones count for more
        ranks |= {key.removesuffix(ending): value.shape[0] for key, value in found.items() if key.endswith(ending)}
    return ranks


def _scales(found: Arrays, metadata: dict[str, str]) -> Scales:
    """By name from `scales`; else alpha / rank from `alphas` by name, then `alpha` of all; else, or without a rank, 1."""
    said, alphas = (json.loads(metadata.get(key, "{}")) for key in ("scales", "alphas"))
    every = metadata.get("alpha")
    scales = {}
    for name, rank in _ranks(found).items():
        alpha = alphas.get(name, every if every is not None else rank)
        scales[name] = float(said.get(name, float(alpha) / rank if rank else 1.0))
    return scales


def _from_peft(metadata: dict[str, str], found: Arrays) -> dict[str, str]:
    """What diffusers keeps in `lora_adapter_metadata`, as our `scales`. Patterns are regular expressions, as PEFT reads them."""
    kept = json.loads(metadata.get("lora_adapter_metadata") or "{}")
    config = {key.removeprefix("transformer."): value for key, value in kept.items()}
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
    patterns = config.get(key) or {}
    return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", name)), otherwise)


def _unfuse(found: Arrays, scales: Scales) -> tuple[Arrays, Scales]:
    """Linears of the reference layout taken apart into diffusers' linears; others stay as they are."""
    arrays: Arrays = {}
    taken: Scales = {}
    for name in linears(found):
        parts, own = names.parts_of(name), of_linear(found, name)
        if name == names.HALVES_SWAPPED:
            own = {ending: _swap_halves(value) if ending in (B, MAGNITUDE, W1) else value for ending, value in own.items()}
        for part, mine in zip(parts, _split(name, own, len(parts)), strict=True):
            arrays |= {part + ending: value for ending, value in mine.items()}
            taken[part] = scales[name]
    return arrays, taken


def _split(name: str, own: Arrays, n: int) -> list[Arrays]:
    """The arrays of n linears whose rows lie below each other in one, in equal numbers."""
    if n == 1:
        return [own]
    if W1 in own:
        if own[W1].shape[0] % n:
            raise ValueError(f"{name}: a LoKr of q, k and v in one, w1 of {own[W1].shape[0]} rows, cannot be taken apart exactly")
        return [{**own, W1: w1} for w1 in mx.split(own[W1], n)]
    made = [{A: a_RI, B: b_OR} for a_RI, b_OR in _split_pair(own[A], own[B], n)]
    if MAGNITUDE not in own:
        return made
    return [{**pair, MAGNITUDE: m} for pair, m in zip(made, mx.split(own[MAGNITUDE], n), strict=True)]


def _split_pair(a_RI: mx.array, b_OR: mx.array, n: int) -> list[tuple[mx.array, mx.array]]:
    """n pairs for n equal groups of B's rows; without the other groups' zero columns if B is block-diagonal."""
    rows = mx.split(b_OR, n)
    if a_RI.shape[0] % n:
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


def _times(array: mx.array, scale: float) -> mx.array:
    return array.astype(mx.float32) * scale


def _swap_halves(rows: mx.array) -> mx.array:
    if rows.shape[0] % 2:
        raise ValueError(f"{names.HALVES_SWAPPED}: {rows.shape[0]} rows have no halves to change places")
    first, second = mx.split(rows, 2)
    return mx.concatenate([second, first])
