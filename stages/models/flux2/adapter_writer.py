"""Turns adapters of FLUX.2 into the arrays that diffusers, ComfyUI and LyCORIS load. R rank, I inputs of a Linear, O outputs."""

from __future__ import annotations

import mlx.core as mx

from stages.models.adapters import ALPHA, DORA_SCALE, MAGNITUDE, W1, W2_B, A, Arrays, B, Scales, linears, of_linear, variant
from stages.models.flux2 import adapter_names as names


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
    groups = dict.fromkeys(names.reference_name(name) for name in linears(arrays))
    if variant(arrays) == "lokr":
        # A LoKr of q, k and v cannot be fused, as the result is no Kronecker product.
        return _to_lycoris(arrays, scales)
    out: Arrays = {}
    for fused in groups:
        out |= _fuse(fused, arrays, scales)
    return out


def _fuse(fused: str, arrays: Arrays, scales: Scales) -> Arrays:
    parts = names.diffusers_names(fused)
    scaled = {part: _scaled(arrays, scales, part) for part in parts if part + B in arrays}
    # Three LoRAs become one exact LoRA of the fused Linear: rows of A are stacked, B is block-diagonal.
    b_OR = block_diagonal([scaled[part][B] if part in scaled else None for part in parts])
    out = {
        f"diffusion_model.{fused}{A}": mx.concatenate([own[A] for own in scaled.values()]),
        f"diffusion_model.{fused}{B}": swap_halves(b_OR) if fused == names.HALVES_SWAPPED else b_OR,
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
        out |= {names.lycoris_name(name) + ending: value for ending, value in {**own, ALPHA: alpha}.items()}
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
    return swap_halves(whole_O1) if fused == names.HALVES_SWAPPED else whole_O1


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
        raise ValueError(f"{names.HALVES_SWAPPED}: {rows.shape[0]} rows have no halves to exchange")
    first, second = mx.split(rows, 2)
    return mx.concatenate([second, first])


def _times(array: mx.array, scale: float) -> mx.array:
    return array.astype(mx.float32) * scale
