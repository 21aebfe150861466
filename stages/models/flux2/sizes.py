"""What the configs of all FLUX.2 models have in common, with the names of the released config files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# vae/config.json: one autoencoder serves every released model.
AUTOENCODER: Mapping[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 32,
    "block_out_channels": (128, 256, 512, 512),
    "decoder_block_out_channels": None,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "patch_size": (2, 2),
    "batch_norm_eps": 1e-4,
    "use_quant_conv": True,
    "use_post_quant_conv": True,
    "mid_block_add_attention": True,
}


def transformer_sizes(double: int, single: int, heads: int, text_features: int, *, guidance: bool = False) -> dict[str, Any]:
    """A transformer's config.json from its numbers of double and single blocks; the rest is equal in every released model."""
    return {
        "in_channels": 128,
        "out_channels": None,
        "num_layers": double,
        "num_single_layers": single,
        "num_attention_heads": heads,
        "attention_head_dim": 128,
        "joint_attention_dim": text_features,
        "mlp_ratio": 3.0,
        "axes_dims_rope": (32, 32, 32, 32),
        "rope_theta": 2000,
        "timestep_guidance_channels": 256,
        "guidance_embeds": guidance,
        "eps": 1e-6,
    }
