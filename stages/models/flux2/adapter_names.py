"""Names of Linears in adapter files: diffusers (ours), Black Forest Labs, kohya, LyCORIS, mflux."""

from __future__ import annotations

import re

from stages.models.adapters import ALPHA, DORA_SCALE, MAGNITUDE, W1, W1_A, W1_B, W2, W2_A, W2_B, A, B
from stages.models.flux2 import key_maps

HALVES_SWAPPED = "final_layer.adaLN_modulation.1"  # its rows are shift, scale; in diffusers scale, shift


def _reference_linears() -> dict[str, tuple[str, ...]]:
    double, single = "transformer_blocks.{}.", "single_transformer_blocks.{}."
    found: dict[str, tuple[str, ...]] = {name: (ours,) for name, ours in key_maps.TRANSFORMER.items()}
    found[HALVES_SWAPPED] = ("norm_out.linear",)
    found |= {f"double_blocks.{{}}.{n}": tuple(double + p for p in parts) for n, parts in key_maps.FUSED.items()}
    found |= {f"double_blocks.{{}}.{n}": (double + p,) for n, p in key_maps.DOUBLE.items() if "norm" not in n}
    return found | {f"single_blocks.{{}}.{n}": (single + p,) for n, p in key_maps.SINGLE.items() if "norm" not in n}


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
    return key_maps.from_mflux(f"{name}.").removesuffix("."), ending


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
