"""Load the transformer, from the diffusers layout or ComfyUI's single file; recognise the components."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from stages.kernels import Arrays
from stages.models import adapter_files, names, weights
from stages.models.family import Family
from stages.models.folders import component_config
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
SPELLINGS = {**REFERENCE, **MFLUX}
LINEARS = ("attention.to_out.0", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "adaLN_modulation.0")
# Most trainers write diffusers' names with a prefix. ComfyUI's own file has q, k and v as one Linear; some adapters do too.
NAMES = adapter_files.Names("Z-Image", SPELLINGS, others=tuple(block + name for block in BLOCKS for name in LINEARS))
UNUSED = "norm_final.weight"  # in ComfyUI's file; no model reads it


def to_diffusers(arrays: Arrays) -> Arrays:
    """From the names of diffusers, ComfyUI or mflux. An unknown name loses its prefix only."""
    kept = {key: value for key, value in arrays.items() if weights.strip_prefix(key) != UNUSED}
    # GGUF has no axes of length 1.
    kept = {key: value.reshape(1, -1) if key.endswith("pad_token") else value for key, value in kept.items()}
    return names.to_diffusers(kept, SPELLINGS)


def transformer_config(path: Path | None, family: Family) -> ZImageConfig:
    """From the config.json at `path`, else from `family`. Raises ValueError if it is not that of a Z-Image transformer."""
    return ZImageConfig.from_dict(component_config(path, family.transformer))


def load_transformer(
    path: Path, family: Family, dtype: Any = None, arrange: Callable[[str, mx.array], Any] | None = None
) -> ZImage:
    """See `Architecture.load_transformer`. Raises ValueError if a weight is missing, unknown, damaged or of another shape."""
    config = transformer_config(path, family)
    return ZImage(config, weights.load_component(path, config.shapes(), convert=to_diffusers, dtype=dtype, arrange=arrange))


def is_transformer(shapes: Mapping[str, tuple[int, ...]], family: Family) -> bool:
    blocks = {name.split(".")[1] for name in shapes if name.startswith("layers.")}
    found = shapes.get("cap_embedder.1.weight", (0,))[0], len(blocks)
    return found == (family.transformer["dim"], family.transformer["n_layers"])
