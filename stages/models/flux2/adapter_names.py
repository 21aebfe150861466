"""The names under which adapters' arrays are kept: ours, diffusers', the FLUX.2 reference's fused ones, kohya's, LyCORIS'.

Ours: diffusers' name of the linear, and an ending that says which array of which kind of adapter it is:

    LoRA   .lora_A.weight (R,I), .lora_B.weight (O,R)        delta W = scale B A
    DoRA   the same, and .lora_magnitude_vector (O,)         W' = magnitude (W + scale B A) / |W + scale B A|, row by row
    LoKr   .lokr_w1 (a,b), .lokr_w2 (c,d), or for a low rank .lokr_w2_a (c,R) and .lokr_w2_b (R,d)
                                                             delta W = scale w1 (x) w2, the Kronecker product

R rank, I inputs of the linear, O outputs; a c = O, b d = I.
"""

from __future__ import annotations

import re

from stages.models.flux2 import key_maps as convert

A, B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
W1, W2, W2_A, W2_B = ".lokr_w1", ".lokr_w2", ".lokr_w2_a", ".lokr_w2_b"
W1_A, W1_B = ".lokr_w1_a", ".lokr_w1_b"  # in files alone: read as their product
ALPHA, DORA_SCALE = ".alpha", ".dora_scale"  # in files alone: read as a scale, and as the magnitude
ENDINGS = (A, B, MAGNITUDE, W1, W2, W2_A, W2_B)
EXACT = (MAGNITUDE, DORA_SCALE, ALPHA)  # a number a row or less: never worth rounding
HALVES_SWAPPED = "final_layer.adaLN_modulation.1"  # rows are shift, scale; in diffusers scale, shift


def _reference() -> dict[str, tuple[str, ...]]:
    """A linear of the reference layout -> the diffusers linears whose rows it stacks, in order; {} is the block's number."""
    double, single = "transformer_blocks.{}.", "single_transformer_blocks.{}."
    found: dict[str, tuple[str, ...]] = {name: (ours,) for name, ours in convert.TRANSFORMER.items()}
    found[HALVES_SWAPPED] = ("norm_out.linear",)
    found |= {f"double_blocks.{{}}.{n}": tuple(double + p for p in parts) for n, parts in convert.FUSED.items()}
    found |= {f"double_blocks.{{}}.{n}": (double + p,) for n, p in convert.DOUBLE.items() if "norm" not in n}
    return found | {f"single_blocks.{{}}.{n}": (single + p,) for n, p in convert.SINGLE.items() if "norm" not in n}


FUSED = _reference()
FUSED_OF = {part: fused for fused, parts in FUSED.items() for part in parts}
PREFIXES = ("base_model.model.", "diffusion_model.", "transformer.")
_UNDERSCORED = {  # with underscores for dots: kohya's the reference's names, LyCORIS' those of the model that it wraps
    "lora_unet_": {fused.replace(".", "_"): fused for fused in FUSED},
    "lycoris_": {part.replace(".", "_"): part for part in FUSED_OF},
}
_READ = {A: A, B: B, ".lora_down.weight": A, ".lora_up.weight": B, MAGNITUDE: MAGNITUDE, MAGNITUDE + ".weight": MAGNITUDE}
_READ |= {DORA_SCALE: MAGNITUDE, ALPHA: ALPHA} | {ending: ending for ending in (W1, W1_A, W1_B, W2, W2_A, W2_B)}
_SPLIT = re.compile("(.+?)(" + "|".join(re.escape(e) for e in sorted(_READ, key=len, reverse=True)) + ")")


def our_name(key: str) -> tuple[str, str]:
    """A file's key -> name of the linear (maybe fused), and an ending: one of ENDINGS, .alpha, .lokr_w1_a or .lokr_w1_b."""
    match = _SPLIT.fullmatch(key)
    if not match:
        raise ValueError(f"{key} is no part of a LoRA, DoRA or LoKr that can be read")
    name, ending = match[1], _READ[match[2]]
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    for prefix, known in _UNDERSCORED.items():
        if name.startswith(prefix):
            block = re.search(r"_(\d+)_", name)
            flat = re.sub(r"_(\d+)_", "_{}_", name.removeprefix(prefix), count=1)
            if flat not in known:
                raise ValueError(f"{key} names no linear of FLUX.2; is the adapter one of another model?")
            name = known[flat].replace("{}", block[1] if block else "")
    return name, ending


def is_bare(key: str) -> bool:
    """Whether a file's key has no prefix that tells who wrote it."""
    return not key.startswith((*PREFIXES, *_UNDERSCORED))


def lycoris(name: str) -> str:
    """A diffusers linear's name as LyCORIS writes it."""
    return "lycoris_" + name.replace(".", "_")


def numbered(name: str) -> tuple[str, str]:
    """`a.3.b` -> (`a.{}.b`, `3`): the first number between dots is the block's."""
    found = re.search(r"\.(\d+)\.", name)
    return re.sub(r"\.(\d+)\.", ".{}.", name, count=1), found[1] if found else ""


def parts_of(name: str) -> list[str]:
    """The diffusers linears that a linear of the reference layout stacks; the name itself if it is none."""
    pattern, block = numbered(name)
    return [part.replace("{}", block) for part in FUSED.get(pattern, (name,))]


def fused_of(name: str) -> str:
    """The linear of the reference layout that holds a diffusers linear's rows; ValueError if there is none."""
    pattern, block = numbered(name)
    if pattern not in FUSED_OF:
        raise ValueError(f"{name} has no counterpart in the FLUX.2 reference layout; export it as diffusers")
    return FUSED_OF[pattern].replace("{}", block)


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts block 2 before block 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
