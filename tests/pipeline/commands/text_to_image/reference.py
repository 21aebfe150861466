"""What exports are held against: a tiny FLUX.2 of diffusers', and its pipeline's own loader of adapters."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

ATTN = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
DOUBLE = (*(f"attn.{n}" for n in ATTN), *(f"{ff}.linear_{n}" for ff in ("ff", "ff_context") for n in ("in", "out")))
SINGLE = ("attn.to_qkv_mlp_proj", "attn.to_out")
BLOCKS = [f"transformer_blocks.{i}.{n}" for i in range(2) for n in DOUBLE] + [
    f"single_transformer_blocks.{i}.{n}" for i in range(2) for n in SINGLE
]
OUTSIDE = ["x_embedder", "context_embedder", "proj_out", "single_stream_modulation.linear", "double_stream_modulation_txt.linear"]


@functools.cache
def tiny_transformer() -> Any:
    """A FLUX.2 transformer of diffusers' own, small, with fixed weights."""
    import torch
    from diffusers import Flux2Transformer2DModel

    torch.manual_seed(0)
    return Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    ).eval()


def forward(transformer: Any) -> np.ndarray:
    import torch

    torch.manual_seed(3)
    ids = torch.cartesian_prod(torch.arange(1), torch.arange(3), torch.arange(3), torch.arange(1)).float()
    text = torch.cartesian_prod(torch.arange(1), torch.arange(1), torch.arange(1), torch.arange(5)).float()
    x, ctx = torch.randn(1, 9, 16), torch.randn(1, 5, 24)
    with torch.no_grad():
        out = transformer(x, ctx, timestep=torch.tensor([0.7]), img_ids=ids[None], txt_ids=text[None], return_dict=False)[0]
    return np.asarray(out.numpy())


def through_diffusers(transformer: Any, file: Path) -> np.ndarray:
    """The output after diffusers' own klein pipeline loaded the file; every adapted linear must be reached."""
    from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline

    pipe = Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), vae=None, text_encoder=None, tokenizer=None, transformer=transformer
    )
    pipe.load_lora_weights(str(file.parent), weight_name=file.name)
    try:
        return forward(transformer)
    finally:
        pipe.unload_lora_weights()
