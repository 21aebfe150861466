"""Rename the weights of a text encoder in a GGUF file, as llama.cpp's converter names them, to the names of `DecoderConfig`.

Source of the table: the names in files of llama.cpp. The arrays may be lazy: no function here evaluates them.
"""

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
    """Return True if the weights are those of a text encoder from a GGUF file. `keys` are the names of the weights."""
    return "token_embd.weight" in keys


def from_gguf(arrays: Mapping[str, mx.array], head_dim: int, interleaved: bool, path: Path) -> dict[str, mx.array]:
    """Rename the weights of a text encoder from a GGUF file, and return them as a dict from the new name to the weight.
    `arrays` maps the names in the file to the weights. For example, "blk.0.ffn_up.weight" becomes
    "layers.0.mlp.up_proj.weight". `head_dim` is the width of an attention head. If `interleaved` is True, the rows of
    queries and keys are put into the order of the library transformers. `path` is the file, for messages. Raises
    ValueError if a name is not known.

    The new names are those in `DecoderConfig.shapes`, and "lm_head.weight" for the output head. Models of Llama's
    architecture, such as Mistral, need `interleaved`. The constants in `UNUSED` are left out.
    """
    done: dict[str, mx.array] = {}
    for key, value in arrays.items():
        if key in UNUSED:
            continue
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", key)
        inside = INSIDE.get(layer[2]) if layer else OUTSIDE.get(key.removesuffix(".weight"))
        if inside is None:
            raise ValueError(f"{path} holds {key}, which FLUX.2's text encoder does not have")
        whole = interleaved and inside in INTERLEAVED
        name = f"layers.{layer[1]}.{inside}.weight" if layer else f"{inside}.weight"
        done[name] = halves_together(value, head_dim) if whole else value
    return done


def halves_together(weight: mx.array, head_dim: int) -> mx.array:
    """Return a weight of queries or keys with its rows in the order of the library transformers. In each attention
    head, the even rows come first, then the odd ones. `weight` has the shape (outputs, inputs). `head_dim` is the
    number of rows of a head.
    """
    heads = weight.shape[0] // head_dim
    return weight.reshape(heads, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)
