"""Load the transformer, from the diffusers layout or ComfyUI's single file; recognise the components."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from stages.kernels import Arrays
from stages.models import names, weights
from stages.models.family import Family
from stages.models.folders import component_config
from stages.models.text.encoder import is_text_encoder
from stages.models.z_image.transformer import KINDS, LAST, LATENT, ZImage, ZImageConfig

# ComfyUI's name -> diffusers' name, where they differ. Source: diffusers' single_file_utils.py, which a test compares.
BLOCKS = tuple(f"{kind}.{{}}." for kind in KINDS)
PARTS = ("attention.to_q", "attention.to_k", "attention.to_v")
INSIDE = {
    "attention.qkv": PARTS,
    "attention.out": ("attention.to_out.0",),
    "attention.q_norm": ("attention.norm_q",),
    "attention.k_norm": ("attention.norm_k",),
}
# Names in models that mflux saves. Source: z_image_lora_mapping.py and transformer.py of mflux.
MFLUX: names.Reference = {
    "t_embedder.linear1": ("t_embedder.mlp.0",),
    "t_embedder.linear2": ("t_embedder.mlp.2",),
    f"{LAST}.adaLN_modulation.0": (f"{LAST}.adaLN_modulation.1",),
}
REFERENCE: names.Reference = {
    "x_embedder": (LATENT,),
    **{f"final_layer.{name}": (f"{LAST}.{name}",) for name in ("linear", "adaLN_modulation.1")},
    **{block + name: tuple(block + part for part in parts) for block in BLOCKS for name, parts in INSIDE.items()},
}
UNUSED = "norm_final.weight"  # in ComfyUI's file; no model reads it


def to_diffusers(arrays: Arrays) -> Arrays:
    """From the names of diffusers, ComfyUI or mflux. An unknown name loses its prefix only."""
    kept = {key: value for key, value in arrays.items() if weights.strip_prefix(key) != UNUSED}
    # GGUF has no axes of length 1.
    kept = {key: value.reshape(1, -1) if key.endswith("pad_token") else value for key, value in kept.items()}
    return names.to_diffusers(kept, {**REFERENCE, **MFLUX})


def transformer_config(path: Path | None, family: Family) -> ZImageConfig:
    """From the config.json at `path`, else from `family`. Raises ValueError if it is not that of a Z-Image transformer."""
    return ZImageConfig.from_dict(component_config(path, family.transformer) if path else family.transformer)


def load_transformer(
    path: Path, family: Family, dtype: Any = None, arrange: Callable[[str, mx.array], Any] | None = None
) -> ZImage:
    """See `Architecture.load_transformer`. Raises ValueError if a weight is missing, unknown, damaged or of another shape."""
    config = transformer_config(path, family)
    return ZImage(config, weights.load_component(path, config.shapes(), convert=to_diffusers, dtype=dtype, arrange=arrange))


def recognise(shapes: Mapping[str, tuple[int, ...]], family: Family) -> str:
    """transformer, autoencoder or text_encoder; "" if the weights fit no component of `family`."""
    # Numbers of columns are not compared: quantised weights have fewer.
    named = {weights.strip_prefix(name): shape for name, shape in shapes.items()}
    if "cap_embedder.1.weight" in named:
        sizes = family.transformer
        blocks = {name.split(".")[1] for name in named if name.startswith("layers.")}
        found = named["cap_embedder.1.weight"][0], len(blocks)
        return "transformer" if found == (sizes["dim"], sizes["n_layers"]) else ""
    if "encoder.conv_in.weight" in named:
        sizes = family.autoencoder
        latent = named.get("decoder.conv_in.weight", (0, 0))[1]
        # FLUX.1's has no statistics, and no convolution beside encoder and decoder.
        other = any("quant_conv" in name or name.startswith("bn.") for name in named)
        found = named["encoder.conv_in.weight"][0], latent
        return "autoencoder" if not other and found == (sizes["block_out_channels"][0], sizes["latent_channels"]) else ""
    return "text_encoder" if is_text_encoder(named, family) else ""
