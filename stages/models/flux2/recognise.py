"""Recognise a component of a FLUX.2 model by the names and shapes of its weights, in any of the layouts that are read."""

from __future__ import annotations

from collections.abc import Mapping

from stages.models.family import Family
from stages.models.flux2.key_maps import strip_prefix

Shapes = Mapping[str, tuple[int, ...]]

INPUTS = ("x_embedder.weight", "img_in.weight")  # the Linear that reads image tokens, in diffusers and in single files
TABLES = ("embed_tokens.weight", "token_embd.weight")
NORMS = ("layers.0.input_layernorm.weight", "blk.0.attn_norm.weight")
DOUBLE = ("transformer_blocks.", "double_blocks.")


def recognise(shapes: Shapes, family: Family) -> str:
    """transformer, autoencoder or text_encoder; "" if the weights fit no component of `family`."""
    # Numbers of columns are not compared: quantised weights have fewer.
    named = {strip_prefix(name): shape for name, shape in shapes.items()}
    if rows := _rows(named, INPUTS):
        sizes = family.transformer
        blocks = {name.split(".")[1] for name in named if name.startswith(DOUBLE)}
        hidden = sizes["num_attention_heads"] * sizes["attention_head_dim"]
        return "transformer" if (rows, len(blocks)) == (hidden, sizes["num_layers"]) else ""
    if "bn.running_mean" in named and "encoder.conv_in.weight" in named:
        sizes = family.autoencoder
        found = named["encoder.conv_in.weight"][0], named["bn.running_mean"]
        return "autoencoder" if found == (sizes["block_out_channels"][0], (4 * sizes["latent_channels"],)) else ""
    sizes = family.text_encoder
    found_rows = _rows(named, TABLES), _rows(named, NORMS)
    return "text_encoder" if found_rows == (sizes["vocab_size"], sizes["hidden_size"]) else ""


def _rows(shapes: Shapes, endings: tuple[str, ...]) -> int:
    for name, shape in shapes.items():
        if name.endswith(endings) and "vision" not in name and shape:
            whole = name in endings or name.endswith(tuple(f".{ending}" for ending in endings))
            if whole:
                return shape[0]
    return 0
