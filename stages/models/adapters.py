"""The arrays of an adapter: their names, whatever the architecture, and the checks that they belong together.

An adapter is a flat dict. A key is the full name of a Linear and an ending that says which array it is:

    LoRA   .lora_A.weight (R,I), .lora_B.weight (O,R)        delta W = scale B A
    DoRA   these and .lora_magnitude_vector (O,)             W' = magnitude (W + scale B A) / |W + scale B A|, row by row
    LoKr   .lokr_w1 (a,b), .lokr_w2 (c,d), or for a low rank .lokr_w2_a (c,R) and .lokr_w2_b (R,d)
                                                             delta W = scale w1 (x) w2, the Kronecker product

R rank, I inputs of the Linear, O outputs; a c = O, b d = I. The endings of LoRA and DoRA are PEFT's.
"""

from __future__ import annotations

import mlx.core as mx

from stages.kernels import Arrays

Scales = dict[str, float]  # by the name of the Linear

A, B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
W1, W2, W2_A, W2_B = ".lokr_w1", ".lokr_w2", ".lokr_w2_a", ".lokr_w2_b"
ENDINGS = (A, B, MAGNITUDE, W1, W2, W2_A, W2_B)
# Endings that occur in files alone: read as the product of two factors, as a scale, and as a magnitude.
W1_A, W1_B, ALPHA, DORA_SCALE = ".lokr_w1_a", ".lokr_w1_b", ".alpha", ".dora_scale"
EXACT = (MAGNITUDE, DORA_SCALE, ALPHA)  # at most one number per row: always written as float32


def linear_name(key: str) -> str:
    """`a.to_q` for "a.to_q.lora_A.weight". Raises ValueError for an unknown ending."""
    for ending in (*ENDINGS, W1_A, W1_B):
        if key.endswith(ending):
            return key.removesuffix(ending)
    raise ValueError(f"{key} is no part of a LoRA, DoRA or LoKr: its ending is unknown")


def linears(arrays: Arrays) -> list[str]:
    """Linears of an adapter, block 2 before block 10. Raises ValueError if the arrays of one do not fit together."""
    names = sorted({linear_name(key) for key in arrays}, key=natural)
    for name in names:
        own = of_linear(arrays, name)
        # The magnitude is optional: it makes a LoRA a DoRA.
        low = (W1, W2_A, W2_B) if {W1, W2_A, W2_B} & own.keys() else (A, B)
        if missing := next((ending for ending in ((W1, W2) if W2 in own else low) if ending not in own), ""):
            raise ValueError(f"the adapter lacks {name}{missing}, though it has other arrays of {name}")
        if MAGNITUDE in own and W1 in own:
            raise ValueError(f"{name}: a LoKr with magnitudes is not supported")
        left, right = (W2_A, W2_B) if W1 in own else (B, A)
        if W2 not in own and own[left].shape[1] != own[right].shape[0]:
            raise ValueError(f"{name}: {left[1:]} {own[left].shape} and {right[1:]} {own[right].shape} do not fit together")
        if MAGNITUDE in own and own[MAGNITUDE].shape != own[B].shape[:1]:
            rows = own[B].shape[0]
            raise ValueError(f"{name}: the magnitude of shape {own[MAGNITUDE].shape} is not one number for each of {rows} rows")
    return names


def of_linear(arrays: Arrays, name: str) -> Arrays:
    return {ending: arrays[name + ending] for ending in ENDINGS if name + ending in arrays}


def variant(arrays: Arrays) -> str:
    if any(key.endswith(W1) for key in arrays):
        return "lokr"
    return "dora" if any(key.endswith(MAGNITUDE) for key in arrays) else "lora"


def ranks(arrays: Arrays) -> dict[str, int]:
    """Rank by Linear. A LoKr of two full factors has none and is left out."""
    return {key.removesuffix(end): value.shape[0] for end in (A, W2_B) for key, value in arrays.items() if key.endswith(end)}


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key of names: block 2 comes before block 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def first_not_finite(arrays: Arrays) -> str:
    return next((key for key, value in arrays.items() if not mx.isfinite(value).all().item()), "")
