"""The two kinds of FLUX.2 blocks as functions of their weights. A caller may replace how their Linears are computed.

B batch, T text rows, L image rows, S = T + L rows, D hidden width, H heads, K head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from stages import kernels
from stages.models.flux2.layers import attend, modulate, norm_and_rotate, silu_times, split_heads, swiglu

Shared = dict[str, Any]  # what all blocks receive: modulations, rotary tables, text positions; arrays and lists of arrays
Linear = Callable[[str, Any, mx.array], mx.array]  # (name within the block, weight, x) -> y; an adapter replaces it


def plain_linear(name: str, weight: Any, x: mx.array) -> mx.array:
    """x W^T. A packed weight has `dense()`."""
    return kernels.linear(x, weight if isinstance(weight, mx.array) else weight.dense())


def text_rows(shared: Shared) -> int:
    # From a shape, so that a compiled block knows it.
    rows: int = shared["ctx_ids"].shape[0]
    return rows


def double_block(weights: dict[str, Any], h_BSD: mx.array, shared: Shared, linear: Linear = plain_linear) -> mx.array:
    """Separate weights for text and image, one joint attention. `shared` is what `Flux2.enter` returned."""

    def apply(name: str, x: mx.array) -> mx.array:
        return linear(name, weights[f"{name}.weight"], x)

    def joint(text_name: str, image_name: str, norms: tuple[str, str] | None = None) -> mx.array:
        parts = []
        for i, (name, x) in enumerate(((text_name, text_in), (image_name, image_in))):
            y_BSHK = split_heads(apply(name, x), width)
            parts.append(norm_and_rotate(y_BSHK, weights[f"{norms[i]}.weight"], ropes[i]) if norms else y_BSHK)
        return mx.concatenate(parts, axis=1)

    T, width = text_rows(shared), weights["attn.norm_q.weight"].shape[0]
    ropes = list(zip(*(mx.split(turn, [T]) for turn in shared["rope"]), strict=True))  # of the text rows, of the image rows
    h_BTD, h_BLD = mx.split(h_BSD, [T], axis=1)
    text, image = shared["text"], shared["image"]
    text_in, image_in = modulate(h_BTD, text), modulate(h_BLD, image)
    q_BSHK = joint("attn.add_q_proj", "attn.to_q", ("attn.norm_added_q", "attn.norm_q"))
    k_BSHK = joint("attn.add_k_proj", "attn.to_k", ("attn.norm_added_k", "attn.norm_k"))
    v_BSHK = joint("attn.add_v_proj", "attn.to_v")
    y_BTD, y_BLD = mx.split(attend(q_BSHK, k_BSHK, v_BSHK), [T], axis=1)
    h_BTD = apply("attn.to_add_out", y_BTD) * text[2] + h_BTD
    h_BLD = apply("attn.to_out.0", y_BLD) * image[2] + h_BLD
    h_BTD = apply("ff_context.linear_out", swiglu(apply("ff_context.linear_in", modulate(h_BTD, text[3:])))) * text[5] + h_BTD
    h_BLD = apply("ff.linear_out", swiglu(apply("ff.linear_in", modulate(h_BLD, image[3:])))) * image[5] + h_BLD
    return mx.concatenate([h_BTD, h_BLD], axis=1)


def single_block(weights: dict[str, Any], h_BSD: mx.array, shared: Shared, linear: Linear = plain_linear) -> mx.array:
    """Text and image as one sequence, attention and feed-forward in parallel."""
    mods, rope, hidden = shared["single"], shared["rope"], h_BSD.shape[-1]
    q_norm, k_norm = weights["attn.norm_q.weight"], weights["attn.norm_k.weight"]
    name = "attn.to_qkv_mlp_proj"
    x = linear(name, weights[f"{name}.weight"], modulate(h_BSD, mods))
    # One split, so that the gradients of all five parts are joined once.
    q, k, v, gate, up = mx.split(x, [hidden, 2 * hidden, 3 * hidden, (x.shape[-1] + 3 * hidden) // 2], axis=-1)
    q_BSHK, k_BSHK, v_BSHK = (split_heads(y, q_norm.shape[0]) for y in (q, k, v))
    y_BSD = attend(norm_and_rotate(q_BSHK, q_norm, rope), norm_and_rotate(k_BSHK, k_norm, rope), v_BSHK)
    y_BSF = mx.concatenate([y_BSD, silu_times(gate, up)], axis=-1)
    name = "attn.to_out"
    gate_BSD: mx.array = mods[2]
    return linear(name, weights[f"{name}.weight"], y_BSF) * gate_BSD + h_BSD
