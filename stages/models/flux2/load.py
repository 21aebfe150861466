"""Load the transformer, from the diffusers layout or Black Forest Labs' single files.

The tables of names say what a weight or an adapter's Linear (adapters.py) of those files is called in diffusers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from stages.kernels import Arrays
from stages.models import names, weights
from stages.models.family import Family
from stages.models.flux2.transformer import Flux2, Flux2Config
from stages.models.folders import component_config

# Black Forest Labs' name -> diffusers' name. Outside the blocks; then within a double, and within a single block.
# Source: model.py and autoencoder.py of the reference repository beside the released diffusers folders. Tests compare them in
# both directions at tiny sizes.
TRANSFORMER = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_guidance_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_guidance_embed.timestep_embedder.linear_2",
    "guidance_in.in_layer": "time_guidance_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_guidance_embed.guidance_embedder.linear_2",
    "double_stream_modulation_img.lin": "double_stream_modulation_img.linear",
    "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
    "single_stream_modulation.lin": "single_stream_modulation.linear",
    "final_layer.linear": "proj_out",
}
DOUBLE = {
    "img_attn.proj": "attn.to_out.0",
    "txt_attn.proj": "attn.to_add_out",
    "img_attn.norm.query_norm": "attn.norm_q",
    "img_attn.norm.key_norm": "attn.norm_k",
    "txt_attn.norm.query_norm": "attn.norm_added_q",
    "txt_attn.norm.key_norm": "attn.norm_added_k",
    "img_mlp.0": "ff.linear_in",
    "img_mlp.2": "ff.linear_out",
    "txt_mlp.0": "ff_context.linear_in",
    "txt_mlp.2": "ff_context.linear_out",
}
SINGLE = {
    "linear1": "attn.to_qkv_mlp_proj",
    "linear2": "attn.to_out",
    "norm.query_norm": "attn.norm_q",
    "norm.key_norm": "attn.norm_k",
}
FUSED = {  # one matrix in Black Forest Labs' files holds the rows of three in diffusers, in this order
    "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
}
HALVES_SWAPPED = "final_layer.adaLN_modulation.1"  # its rows are shift, scale; in diffusers' norm_out scale, shift
REFERENCE: names.Reference = {
    **{name: (ours,) for name, ours in TRANSFORMER.items()},
    HALVES_SWAPPED: ("norm_out.linear",),
    **{f"double_blocks.{{}}.{n}": tuple("transformer_blocks.{}." + p for p in parts) for n, parts in FUSED.items()},
    **{f"double_blocks.{{}}.{n}": ("transformer_blocks.{}." + p,) for n, p in DOUBLE.items()},
    **{f"single_blocks.{{}}.{n}": ("single_transformer_blocks.{}." + p,) for n, p in SINGLE.items()},
}


# Names in models that mflux saves, where they differ from diffusers'.
MFLUX: names.Reference = {
    **{f"time_guidance_embed.linear_{i}": (f"time_guidance_embed.timestep_embedder.linear_{i}",) for i in (1, 2)},
    "transformer_blocks.{}.attn.to_out": ("transformer_blocks.{}.attn.to_out.0",),
}
SPELLINGS = {**REFERENCE, **MFLUX}


def to_diffusers(arrays: Arrays) -> Arrays:
    """From the names of diffusers, Black Forest Labs or mflux. An unknown name loses its prefix only."""
    return names.to_diffusers(arrays, SPELLINGS, HALVES_SWAPPED)


def transformer_config(path: Path | None, family: Family) -> Flux2Config:
    """From the config.json at `path`, else from `family`. Raises ValueError if it is not that of a FLUX.2 transformer."""
    return Flux2Config.from_dict(component_config(path, family.transformer))


def load_flux2(path: Path, family: Family, dtype: Any = None, arrange: Callable[[str, mx.array], Any] | None = None) -> Flux2:
    """See `Architecture.load_transformer`. Raises ValueError if a weight is missing, unknown, damaged or of another shape."""
    config = transformer_config(path, family)
    return Flux2(config, weights.load_component(path, config.shapes(), convert=to_diffusers, dtype=dtype, arrange=arrange))


def is_transformer(shapes: Mapping[str, tuple[int, ...]], family: Family) -> bool:
    embedder = shapes.get("x_embedder.weight") or shapes.get("img_in.weight") or (0,)
    sizes = family.transformer
    blocks = {name.split(".")[1] for name in shapes if name.startswith(("transformer_blocks.", "double_blocks."))}
    hidden = sizes["num_attention_heads"] * sizes["attention_head_dim"]
    return (embedder[0], len(blocks)) == (hidden, sizes["num_layers"])
