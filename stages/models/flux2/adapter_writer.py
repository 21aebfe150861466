"""Adapters of FLUX.2 turned into the arrays that diffusers, ComfyUI and LyCORIS load.

R rank, I inputs of a Linear, O outputs.
"""

from __future__ import annotations

import mlx.core as mx

from stages.models.adapters import ALPHA, DORA_SCALE, MAGNITUDE, W1, W2_B, A, Arrays, B, Scales, linears, of_linear, variant
from stages.models.flux2 import adapter_names as names


def to_diffusers(arrays: Arrays, scales: Scales) -> Arrays:
    """Return an adapter under the keys that diffusers loads: "transformer.<Linear><ending>", with PEFT's endings.
    The scale of each Linear is multiplied into B or w1, so that a reader that ignores metadata is right, too.
    """
    out: Arrays = {}
    for name in linears(arrays):
        out |= {f"transformer.{name}{ending}": value for ending, value in _scaled(arrays, scales, name).items()}
    return out


def to_comfyui(arrays: Arrays, scales: Scales) -> Arrays:
    """Return an adapter under the keys that ComfyUI loads, in the reference repository's names. Scales are folded in.
    A LoRA of q, k and v becomes an exact LoRA of the fused Linear: the rows of A are stacked, B is block-diagonal. A DoRA's
    magnitude becomes `.dora_scale` (O,1). The fused q, k and v of a LoKr are no Kronecker product, so that a LoKr gets
    LyCORIS' names instead. ValueError for a Linear that the reference repository does not have, or a DoRA of only some of
    q, k and v.
    """
    groups = dict.fromkeys(names.reference_name(name) for name in linears(arrays))
    if variant(arrays) == "lokr":
        return _to_lycoris(arrays, scales)
    out: Arrays = {}
    for fused in groups:
        out |= _fused(fused, arrays, scales)
    return out


def _fused(fused: str, arrays: Arrays, scales: Scales) -> Arrays:
    """Return the arrays of one Linear of the reference repository, from those of the diffusers Linears that it stacks."""
    parts = names.diffusers_names(fused)
    scaled = {part: _scaled(arrays, scales, part) for part in parts if part + B in arrays}
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
    """Return a LoKr under LyCORIS' keys. A factor of low rank keeps its scale as `.alpha`; else the scale is in w1."""
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
    """Return the arrays of one Linear by their endings, with its scale multiplied into w1 or B."""
    own = of_linear(arrays, name)
    target = W1 if W1 in own else B
    return {**own, target: _times(own[target], scales[name])}


def _dora_scale(fused: str, magnitudes: list[mx.array | None]) -> mx.array:
    """Return the magnitudes of fused Linears as one column (O,1): ComfyUI would lay a plain vector along the inputs."""
    present = [magnitude for magnitude in magnitudes if magnitude is not None]
    if len(present) < len(magnitudes):
        raise ValueError(
            f"{fused}: a DoRA of some of q, k and v cannot be fused, the others' lengths are the base's; export as diffusers"
        )
    whole_O1 = mx.concatenate(present)[:, None]
    return swap_halves(whole_O1) if fused == names.HALVES_SWAPPED else whole_O1


def block_diagonal(blocks: list[mx.array | None]) -> mx.array:
    """Place matrices (outputs, rank) down the diagonal of one matrix. None stands for a Linear without adapter: rows of zeros.
    ValueError if the matrices have different numbers of rows.
    """
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
    """Exchange the first and the second half of the rows. ValueError if their number is odd."""
    if rows.shape[0] % 2:
        raise ValueError(f"{names.HALVES_SWAPPED}: {rows.shape[0]} rows have no halves to exchange")
    first, second = mx.split(rows, 2)
    return mx.concatenate([second, first])


def _times(array: mx.array, scale: float) -> mx.array:
    return array.astype(mx.float32) * scale
