"""Renames the weights of a text encoder in a GGUF file, as llama.cpp's converter names them, to the names of `DecoderConfig`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import mlx.core as mx

OUTSIDE = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
INSIDE = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
UNUSED = ("rope_freqs.weight",)  # constants of the rotary embedding
INTERLEAVED = ("self_attn.q_proj", "self_attn.k_proj")


def is_gguf(keys: Iterable[str]) -> bool:
    return "token_embd.weight" in keys


def from_gguf(arrays: Mapping[str, mx.array], head_dim: int, interleaved: bool, path: Path) -> dict[str, mx.array]:
    """`interleaved`: the model is of Llama's architecture, such as Mistral. Raises ValueError if a name is not known."""
    done: dict[str, mx.array] = {}
    for key, value in arrays.items():
        if key in UNUSED:
            continue
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", key)
        inside = INSIDE.get(layer[2]) if layer else OUTSIDE.get(key.removesuffix(".weight"))
        if inside is None:
            raise ValueError(f"{path} holds {key}, which FLUX.2's text encoder does not have")
        # Files of Llama's architecture have the rows of queries and keys in another order than transformers.
        whole = interleaved and inside in INTERLEAVED
        name = f"layers.{layer[1]}.{inside}.weight" if layer else f"{inside}.weight"
        done[name] = halves_together(value, head_dim) if whole else value
    return done


def halves_together(weight: mx.array, head_dim: int) -> mx.array:
    """Rows in the order of transformers: in each head the even rows come first, then the odd ones."""
    heads = weight.shape[0] // head_dim
    return weight.reshape(heads, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)
