"""Adapters of FLUX.2 in the layouts of this program and diffusers, of ComfyUI, kohya and LyCORIS.

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
    DORA_SCALE,
    MAGNITUDE,
    W1,
    W1_A,
    W1_B,
    W2,
    W2_A,
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
from stages.models.flux2 import load

HALVES_SWAPPED = "final_layer.adaLN_modulation.1"  # its rows are shift, scale; in diffusers scale, shift


def _reference_linears() -> dict[str, tuple[str, ...]]:
    double, single = "transformer_blocks.{}.", "single_transformer_blocks.{}."
    found: dict[str, tuple[str, ...]] = {name: (ours,) for name, ours in load.TRANSFORMER.items()}
    found[HALVES_SWAPPED] = ("norm_out.linear",)
    found |= {f"double_blocks.{{}}.{n}": tuple(double + p for p in parts) for n, parts in load.FUSED.items()}
    found |= {f"double_blocks.{{}}.{n}": (double + p,) for n, p in load.DOUBLE.items() if "norm" not in n}
    return found | {f"single_blocks.{{}}.{n}": (single + p,) for n, p in load.SINGLE.items() if "norm" not in n}


# Black Forest Labs' name -> diffusers' names, three in the order of its rows where q, k and v are one Linear. {} is the
# block's number.
FUSED = _reference_linears()
FUSED_OF = {part: fused for fused, parts in FUSED.items() for part in parts}
PREFIXES = ("base_model.model.", "diffusion_model.", "transformer.")
_UNDERSCORED = {  # underscores for dots: kohya writes Black Forest Labs' names so, LyCORIS diffusers' names
    "lora_unet_": {fused.replace(".", "_"): fused for fused in FUSED},
    "lycoris_": {part.replace(".", "_"): part for part in FUSED_OF},
}
_READ = {A: A, B: B, ".lora_down.weight": A, ".lora_up.weight": B, MAGNITUDE: MAGNITUDE, MAGNITUDE + ".weight": MAGNITUDE}
_READ |= {DORA_SCALE: MAGNITUDE, ALPHA: ALPHA} | {ending: ending for ending in (W1, W1_A, W1_B, W2, W2_A, W2_B)}
_SPLIT = re.compile("(.+?)(" + "|".join(re.escape(e) for e in sorted(_READ, key=len, reverse=True)) + ")")


def parse_key(key: str) -> tuple[str, str]:
    """(Linear, ending): transformer.proj_out.lora_down.weight -> (proj_out, .lora_A.weight). Names may be Black Forest Labs'.

    Endings are `adapters.ENDINGS`, ".alpha", ".lokr_w1_a" and ".lokr_w1_b". Raises ValueError for any other adapter or model.
    """
    match = _SPLIT.fullmatch(key)
    if not match:
        raise ValueError(f"{key} is no part of a LoRA, DoRA or LoKr that can be read")
    name, ending = match[1], _READ[match[2]]
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    for prefix, known in _UNDERSCORED.items():
        if name.startswith(prefix):
            name = _dotted(key, name.removeprefix(prefix), known)
    return load.from_mflux(f"{name}.").removesuffix("."), ending


def _dotted(key: str, flat: str, known: dict[str, str]) -> str:
    # transformer_blocks_3_attn_to_q -> transformer_blocks.3.attn.to_q
    block = re.search(r"_(\d+)_", flat)
    pattern = re.sub(r"_(\d+)_", "_{}_", flat, count=1)
    if pattern not in known:
        raise ValueError(f"{key} names no linear of FLUX.2; is the adapter one of another model?")
    return known[pattern].replace("{}", block[1] if block else "")


def has_prefix(key: str) -> bool:
    """Whether a key starts with another program's prefix."""
    return key.startswith((*PREFIXES, *_UNDERSCORED))


def lycoris_name(name: str) -> str:
    return "lycoris_" + name.replace(".", "_")


def diffusers_names(name: str) -> list[str]:
    """diffusers' names of a Linear of Black Forest Labs' code: three if it stacks q, k and v; [name] if it is unknown."""
    pattern, block = _split_number(name)
    return [part.replace("{}", block) for part in FUSED.get(pattern, (name,))]


def reference_name(name: str) -> str:
    """Black Forest Labs' name of a diffusers Linear; q, k and v share one. Raises ValueError if that code has no such Linear."""
    pattern, block = _split_number(name)
    if pattern not in FUSED_OF:
        raise ValueError(f"{name} has no counterpart in the FLUX.2 reference layout; export it as diffusers")
    return FUSED_OF[pattern].replace("{}", block)


def _split_number(name: str) -> tuple[str, str]:
    # "a.3.b" -> ("a.{}.b", "3")
    found = re.search(r"\.(\d+)\.", name)
    return re.sub(r"\.(\d+)\.", ".{}.", name, count=1), found[1] if found else ""


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
        name, ending = parse_key(key)
        wide = arrays[key].astype(mx.float32)
        if ending == ALPHA:
            alphas[name] = float(np.array(wide).item())
        else:
            found[name + ending] = _as_vector(key, wide) if ending == MAGNITUDE else wide
    # Alphas as arrays (kohya, LyCORIS); else PEFT's config, if the keys have a prefix; else this program's metadata.
    if alphas:
        metadata = {"alphas": json.dumps(alphas)}
    elif any(has_prefix(key) for key in arrays):
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
        parts, own = diffusers_names(name), of_linear(arrays, name)
        if name == HALVES_SWAPPED:
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


def to_diffusers(arrays: Arrays, scales: Scales) -> Arrays:
    """Keys such as "transformer.proj_out.lora_A.weight", scales multiplied in. Raises ValueError for an incomplete Linear."""
    out: Arrays = {}
    for name in linears(arrays):
        out |= {f"transformer.{name}{ending}": value for ending, value in _scaled(arrays, scales, name).items()}
    return out


def to_comfyui(arrays: Arrays, scales: Scales) -> Arrays:
    """Black Forest Labs' names for a LoRA or DoRA, LyCORIS' for a LoKr, with scales multiplied in.

    Raises ValueError for a Linear that Black Forest Labs' code does not have, or a DoRA of only some of q, k and v.
    """
    # Before the LoKr, so that a Linear without counterpart is an error there too.
    groups = dict.fromkeys(reference_name(name) for name in linears(arrays))
    if variant(arrays) == "lokr":
        # A LoKr of q, k and v cannot be fused, as the result is no Kronecker product.
        return _to_lycoris(arrays, scales)
    out: Arrays = {}
    for fused in groups:
        out |= _fuse(fused, arrays, scales)
    return out


def _fuse(fused: str, arrays: Arrays, scales: Scales) -> Arrays:
    parts = diffusers_names(fused)
    scaled = {part: _scaled(arrays, scales, part) for part in parts if part + B in arrays}
    # Three LoRAs become one exact LoRA of the fused Linear: rows of A are stacked, B is block-diagonal.
    b_OR = block_diagonal([scaled[part][B] if part in scaled else None for part in parts])
    out = {
        f"diffusion_model.{fused}{A}": mx.concatenate([own[A] for own in scaled.values()]),
        f"diffusion_model.{fused}{B}": swap_halves(b_OR) if fused == HALVES_SWAPPED else b_OR,
    }
    if any(MAGNITUDE in own for own in scaled.values()):
        magnitudes = [scaled.get(part, {}).get(MAGNITUDE) for part in parts]
        out[f"diffusion_model.{fused}{DORA_SCALE}"] = _dora_scale(fused, magnitudes)
    return out


def _to_lycoris(arrays: Arrays, scales: Scales) -> Arrays:
    out: Arrays = {}
    for name in linears(arrays):
        own = of_linear(arrays, name)
        low = W2_B in own  # LyCORIS divides alpha by the rank of a factor of low rank alone
        if not low:
            own[W1] = _times(own[W1], scales[name])
        alpha = mx.array(scales[name] * own[W2_B].shape[0] if low else 1.0, mx.float32)
        out |= {lycoris_name(name) + ending: value for ending, value in {**own, ALPHA: alpha}.items()}
    return out


def _scaled(arrays: Arrays, scales: Scales, name: str) -> Arrays:
    own = of_linear(arrays, name)
    target = W1 if W1 in own else B
    return {**own, target: _times(own[target], scales[name])}


def _dora_scale(fused: str, magnitudes: list[mx.array | None]) -> mx.array:
    present = [magnitude for magnitude in magnitudes if magnitude is not None]
    if len(present) < len(magnitudes):
        raise ValueError(
            f"{fused}: a DoRA of some of q, k and v cannot be fused, the others' lengths are the base's; export as diffusers"
        )
    # A column: ComfyUI would lay a plain vector along the inputs.
    whole_O1 = mx.concatenate(present)[:, None]
    return swap_halves(whole_O1) if fused == HALVES_SWAPPED else whole_O1


def block_diagonal(blocks: list[mx.array | None]) -> mx.array:
    """`blocks` (outputs, rank) on a diagonal, zeros elsewhere; None adds rows of zeros. Raises ValueError if outputs differ."""
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


def swap_halves(rows: mx.array) -> mx.array:
    """Exchange the halves of axis 0. Raises ValueError if its length is odd."""
    if rows.shape[0] % 2:
        raise ValueError(f"{HALVES_SWAPPED}: {rows.shape[0]} rows have no halves to exchange")
    first, second = mx.split(rows, 2)
    return mx.concatenate([second, first])


def _times(array: mx.array, scale: float) -> mx.array:
    return array.astype(mx.float32) * scale
