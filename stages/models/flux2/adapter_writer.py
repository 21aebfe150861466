"""Adapters of FLUX.2 turned into the arrays that diffusers, ComfyUI and LyCORIS load.

R rank, I inputs of a Linear, O outputs.
"""

from __future__ import annotations

import mlx.core as mx

from stages.models.adapters import ALPHA, DORA_SCALE, MAGNITUDE, W1, W2_B, A, Arrays, B, Scales, linears, of_linear, variant
from stages.models.flux2 import adapter_names as names


def to_diffusers(arrays: Arrays, scales: Scales) -> Arrays:
    """Return the adapter under the keys that diffusers loads, such as "transformer.proj_out.lora_A.weight". `arrays`
    maps keys such as "proj_out.lora_A.weight" to arrays. `scales` maps each Linear to the scale of its update. The
    scale is multiplied into one of the Linear's arrays. Raises ValueError if a Linear lacks an array, or if its shapes
    do not fit together.
    """
    out: Arrays = {}
    for name in linears(arrays):
        out |= {f"transformer.{name}{ending}": value for ending, value in _scaled(arrays, scales, name).items()}
    return out


def to_comfyui(arrays: Arrays, scales: Scales) -> Arrays:
    """Return the adapter under the keys that ComfyUI loads. `arrays` maps keys such as "proj_out.lora_A.weight" to
    arrays. `scales` maps each Linear to the factor of its update. The factor becomes part of the returned arrays.
    Raises ValueError for a Linear that Black Forest Labs' code does not have, or for a DoRA of only some of q, k and v.

    In the keys of a LoRA or DoRA, Linears have the names of Black Forest Labs' code. In the keys of a LoKr, they have
    LyCORIS' names. A LoRA of q, k and v becomes an exact LoRA of the fused Linear: the rows of A are stacked, B is
    block-diagonal. A DoRA's magnitude becomes `.dora_scale` (outputs, 1). A LoKr of q, k and v cannot be fused, as the
    result is no Kronecker product.
    """
    groups = dict.fromkeys(names.reference_name(name) for name in linears(arrays))
    if variant(arrays) == "lokr":
        return _to_lycoris(arrays, scales)
    out: Arrays = {}
    for fused in groups:
        out |= _fuse(fused, arrays, scales)
    return out


def _fuse(fused: str, arrays: Arrays, scales: Scales) -> Arrays:
    """Return the LoRA or DoRA of one Linear as a dict from key to array, with the keys that ComfyUI loads. `fused` is
    the Linear's name in Black Forest Labs' code (the FLUX.2 reference code); ComfyUI uses these names. If diffusers has
    three Linears instead of `fused`, their three adapters are joined into one. `arrays` maps diffusers' keys, such as
    "proj_out.lora_A.weight", to the adapter's arrays. `scales` maps diffusers' name of each Linear to the factor of its
    update. Raises ValueError if the adapters cannot be joined.

    For example, "double_blocks.3.img_attn.qkv" is one Linear in Black Forest Labs' code, but three in diffusers: the
    queries, keys and values of an attention. Their three LoRAs become one LoRA. The LoRAs cannot be joined if they have
    different numbers of outputs. DoRAs can be joined only if all three Linears have one.

    The factors in `scales` become part of the returned arrays. A key of the result is "diffusion_model.", `fused` and
    an ending.
    """
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
    """Return a LoKr (a Kronecker product of two factors) under the keys that LyCORIS loads. Such a key is "lycoris_",
    the Linear's name with underscores, and an ending. `arrays` maps keys such as "proj_out.lokr_w1" to arrays. `scales`
    maps each Linear to the scale of its update. If the second factor is one full matrix, the scale is multiplied into
    the first factor. If it is two low-rank matrices, the array ".alpha" holds the scale times their rank.
    """
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
    """Return the arrays of the Linear `name`, one of them multiplied by the Linear's scale. The result maps an ending,
    such as ".lora_A.weight", to an array. `arrays` maps full keys, such as "proj_out.lora_A.weight", to arrays.
    `scales` maps the name of each Linear to its scale. In a LoKr, the first factor is multiplied. In a LoRA or DoRA,
    the matrix B is multiplied.
    """
    own = of_linear(arrays, name)
    target = W1 if W1 in own else B
    return {**own, target: _times(own[target], scales[name])}


def _dora_scale(fused: str, magnitudes: list[mx.array | None]) -> mx.array:
    """Join the DoRA magnitudes of several diffusers Linears into one column `(outputs, 1)`. `fused` is the Linear that
    stacks them (q, k and v, say), by its name in Black Forest Labs' code. `magnitudes` has one array `(outputs,)` for
    each of them, in order. Raises ValueError if one of these Linears has no magnitude (None).

    The shape is a column, because ComfyUI would lay a plain vector along the inputs.
    """
    present = [magnitude for magnitude in magnitudes if magnitude is not None]
    if len(present) < len(magnitudes):
        raise ValueError(
            f"{fused}: a DoRA of some of q, k and v cannot be fused, the others' lengths are the base's; export as diffusers"
        )
    whole_O1 = mx.concatenate(present)[:, None]
    return swap_halves(whole_O1) if fused == names.HALVES_SWAPPED else whole_O1


def block_diagonal(blocks: list[mx.array | None]) -> mx.array:
    """Return one matrix that has the matrices `blocks` on its diagonal and zeros elsewhere. Each matrix has the shape
    `(outputs, rank)`. The number of outputs is the same for all. None stands for a Linear without an adapter, and adds
    as many rows of zeros. For example, matrices of shape `(4, 2)` and `(4, 3)` with None between them give the shape
    `(12, 5)`. Raises ValueError if the numbers of outputs differ.

    If there are several blocks and all are None, ValueError is raised too.
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
    """Return a copy of the array `rows` with the first and the second half of axis 0 exchanged. Raises ValueError if
    the length of axis 0 is odd.
    """
    if rows.shape[0] % 2:
        raise ValueError(f"{names.HALVES_SWAPPED}: {rows.shape[0]} rows have no halves to exchange")
    first, second = mx.split(rows, 2)
    return mx.concatenate([second, first])


def _times(array: mx.array, scale: float) -> mx.array:
    return array.astype(mx.float32) * scale
