"""The names of FLUX.2's Linears in adapter files, and its adapters in ComfyUI's names."""

from __future__ import annotations

import mlx.core as mx

from stages.kernels import Arrays
from stages.models import adapter_files, adapters, names, weights
from stages.models.adapters import ALPHA, DORA_SCALE, MAGNITUDE, W1, W2_B, A, B, Scales
from stages.models.flux2 import load

REFERENCE_OF = {part: name for name, parts in load.REFERENCE.items() for part in parts}
NAMES = adapter_files.Names("FLUX.2", load.SPELLINGS, load.HALVES_SWAPPED)


def to_comfyui(arrays: Arrays, scales: Scales) -> Arrays:
    """Black Forest Labs' names, LyCORIS' for LoKr; scales multiplied in. ValueError for a DoRA of only some of q, k and v."""
    # Before the LoKr, so that a Linear without counterpart is an error there too.
    groups: dict[str, None] = {}
    for name in adapters.linears(arrays):
        pattern, block = names.split_number(name)
        if pattern not in REFERENCE_OF:
            raise ValueError(f"{name} has no counterpart in the FLUX.2 reference layout; export it as diffusers")
        groups[REFERENCE_OF[pattern].replace("{}", block)] = None
    if adapters.variant(arrays) == "lokr":
        # A LoKr of q, k and v cannot be fused, as the result is no Kronecker product.
        return _to_lycoris(arrays, scales)
    out: Arrays = {}
    for fused in groups:
        out |= _fuse(fused, arrays, scales)
    return out


def _fuse(fused: str, arrays: Arrays, scales: Scales) -> Arrays:
    parts = names.parts(fused, load.REFERENCE)
    scaled = {part: adapter_files.scaled(arrays, scales, part) for part in parts if part + B in arrays}
    swap = weights.swap_halves if fused == NAMES.swapped else lambda rows: rows
    # Three LoRAs become one exact LoRA of the fused Linear: rows of A are stacked, B is block-diagonal.
    b_OR = adapter_files.block_diagonal([scaled[part][B] if part in scaled else None for part in parts])
    out = {
        f"diffusion_model.{fused}{A}": mx.concatenate([own[A] for own in scaled.values()]),
        f"diffusion_model.{fused}{B}": swap(b_OR),
    }
    if magnitudes := [own[MAGNITUDE] for own in scaled.values() if MAGNITUDE in own]:
        if len(magnitudes) < len(parts):
            raise ValueError(
                f"{fused}: a DoRA of some of q, k and v cannot be fused, the others' lengths are the base's; export as diffusers"
            )
        # A column: ComfyUI would lay a plain vector along the inputs.
        out[f"diffusion_model.{fused}{DORA_SCALE}"] = swap(mx.concatenate(magnitudes)[:, None])
    return out


def _to_lycoris(arrays: Arrays, scales: Scales) -> Arrays:
    out: Arrays = {}
    for name in adapters.linears(arrays):
        own = adapters.of_linear(arrays, name)
        low = W2_B in own  # LyCORIS divides alpha by the rank of a factor of low rank alone
        if not low:
            own[W1] = own[W1].astype(mx.float32) * scales[name]
        alpha = mx.array(scales[name] * own[W2_B].shape[0] if low else 1.0, mx.float32)
        out |= {"lycoris_" + name.replace(".", "_") + ending: value for ending, value in {**own, ALPHA: alpha}.items()}
    return out
