"""Translate the names of Linears in adapter files of FLUX.2. The names may be those of diffusers, Black Forest Labs, kohya,
LyCORIS or mflux.

This program uses diffusers' names. Black Forest Labs' code (the FLUX.2 reference repository) fuses q, k and v into one Linear.
"""

from __future__ import annotations

import re

from stages.models.adapters import ALPHA, DORA_SCALE, MAGNITUDE, W1, W1_A, W1_B, W2, W2_A, W2_B, A, B
from stages.models.flux2 import key_maps

HALVES_SWAPPED = "final_layer.adaLN_modulation.1"  # its rows are shift, scale; in diffusers scale, shift


def _reference_linears() -> dict[str, tuple[str, ...]]:
    """Return the Linears of Black Forest Labs' code and their diffusers names. The result maps each name in that code
    to a tuple of diffusers names. A Linear that stacks q, k and v has three, in the order of its rows. Most have one.
    In all names, "{}" replaces the block's number. For example, "double_blocks.{}.img_attn.proj" maps to
    `("transformer_blocks.{}.attn.to_out.0",)`.
    """
    double, single = "transformer_blocks.{}.", "single_transformer_blocks.{}."
    found: dict[str, tuple[str, ...]] = {name: (ours,) for name, ours in key_maps.TRANSFORMER.items()}
    found[HALVES_SWAPPED] = ("norm_out.linear",)
    found |= {f"double_blocks.{{}}.{n}": tuple(double + p for p in parts) for n, parts in key_maps.FUSED.items()}
    found |= {f"double_blocks.{{}}.{n}": (double + p,) for n, p in key_maps.DOUBLE.items() if "norm" not in n}
    return found | {f"single_blocks.{{}}.{n}": (single + p,) for n, p in key_maps.SINGLE.items() if "norm" not in n}


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
    """Split a key of an adapter file into (name of the Linear, ending). "transformer.proj_out.lora_down.weight" gives
    ("proj_out", ".lora_A.weight"). Keys of this program, diffusers, ComfyUI, kohya, LyCORIS and mflux are understood. The
    name is that of diffusers or of Black Forest Labs' code. The ending is one of `adapters.ENDINGS`, ".alpha", ".lokr_w1_a"
    or ".lokr_w1_b". Raises ValueError if the key is not of a LoRA, DoRA or LoKr, or is of another model.
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
    return key_maps.from_mflux(f"{name}.").removesuffix("."), ending


def _dotted(key: str, flat: str, known: dict[str, str]) -> str:
    """Return the name of a Linear with dots, made from its name `flat` with underscores. For example,
    "transformer_blocks_3_attn_to_q" gives "transformer_blocks.3.attn.to_q". `known` maps names with underscores to
    names with dots. In both, "{}" stands for the block's number. Raises ValueError if `known` lacks the name. `key` is
    the whole key of the adapter file, for the message.
    """
    block = re.search(r"_(\d+)_", flat)
    pattern = re.sub(r"_(\d+)_", "_{}_", flat, count=1)
    if pattern not in known:
        raise ValueError(f"{key} names no linear of FLUX.2; is the adapter one of another model?")
    return known[pattern].replace("{}", block[1] if block else "")


def has_prefix(key: str) -> bool:
    """Return True if a key of an adapter file starts with another program's prefix. "transformer." and "lora_unet_" are such
    prefixes.
    """
    return key.startswith((*PREFIXES, *_UNDERSCORED))


def lycoris_name(name: str) -> str:
    """Return LyCORIS' name of a Linear from its diffusers name. "norm_out.linear" gives "lycoris_norm_out_linear"."""
    return "lycoris_" + name.replace(".", "_")


def diffusers_names(name: str) -> list[str]:
    """Return the diffusers names of one Linear. `name` is the Linear's name in Black Forest Labs' code. A Linear that
    stacks q, k and v, such as "double_blocks.3.img_attn.qkv", gives three names. They have the order of its rows. Most
    Linears give one name. An unknown `name` gives `[name]`.
    """
    pattern, block = _split_number(name)
    return [part.replace("{}", block) for part in FUSED.get(pattern, (name,))]


def reference_name(name: str) -> str:
    """Return the name that Black Forest Labs' code uses for a Linear. `name` is the Linear's diffusers name. For
    example, "transformer_blocks.3.attn.to_q" gives "double_blocks.3.img_attn.qkv". There, q, k and v are one Linear, so
    three diffusers names give this result. Raises ValueError if that code has no such Linear.
    """
    pattern, block = _split_number(name)
    if pattern not in FUSED_OF:
        raise ValueError(f"{name} has no counterpart in the FLUX.2 reference layout; export it as diffusers")
    return FUSED_OF[pattern].replace("{}", block)


def _split_number(name: str) -> tuple[str, str]:
    """Return (name with "{}" for the block's number, the number). "a.3.b" gives ("a.{}.b", "3"). The number is the first one
    between dots. A name without a number gives (`name`, "").
    """
    found = re.search(r"\.(\d+)\.", name)
    return re.sub(r"\.(\d+)\.", ".{}.", name, count=1), found[1] if found else ""
