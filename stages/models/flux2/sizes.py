"""The sizes of the FLUX.2 models, with the names of the released config files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# FLUX.2's autoencoder: one for every released family.
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


def _transformer(double: int, single: int, heads: int, joint: int, *, guidance: bool = False) -> dict[str, Any]:
    """FLUX.2's transformer by its four sizes; the rest never varies among the released ones."""
    return {
        "in_channels": 128,
        "out_channels": None,
        "num_layers": double,
        "num_single_layers": single,
        "num_attention_heads": heads,
        "attention_head_dim": 128,
        "joint_attention_dim": joint,
        "mlp_ratio": 3.0,
        "axes_dims_rope": (32, 32, 32, 32),
        "rope_theta": 2000,
        "timestep_guidance_channels": 256,
        "guidance_embeds": guidance,
        "eps": 1e-6,
    }


def _qwen3(hidden: int, inner: int, *, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
    }


KLEIN_4B = _transformer(5, 20, 24, 7680)
KLEIN_9B = _transformer(8, 24, 32, 12288)
DEV = _transformer(8, 48, 48, 15360, guidance=True)
QWEN3_4B = _qwen3(2560, 9728, tied=True)
QWEN3_8B = _qwen3(4096, 12288, tied=False)
MISTRAL_24B: Mapping[str, Any] = {
    "model_type": "mistral3",
    "vocab_size": 131072,
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e9,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
# The true architecture, small enough for a laptop's CPU: every kind of layer occurs, nothing is wide.
TINY_TRANSFORMER: Mapping[str, Any] = _transformer(2, 2, 2, 192) | {"attention_head_dim": 32, "axes_dims_rope": (8, 8, 8, 8)}
TINY_QWEN3: Mapping[str, Any] = _qwen3(64, 128, tied=True) | {
    "vocab_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TINY_AUTOENCODER: Mapping[str, Any] = {
    **AUTOENCODER,
    "block_out_channels": (8, 16, 16, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
}
# The same at a size that learns in minutes on a CPU: 16 pixels to an image token, as in the released ones.
MICRO_TRANSFORMER: Mapping[str, Any] = _transformer(2, 5, 4, 384) | {"attention_head_dim": 64, "axes_dims_rope": (16, 16, 16, 16)}
MICRO_QWEN3: Mapping[str, Any] = _qwen3(128, 384, tied=True) | {
    "vocab_size": 1024,
    "num_hidden_layers": 7,  # the last is not read, as in the released ones
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MICRO_AUTOENCODER: Mapping[str, Any] = {
    **AUTOENCODER,
    "block_out_channels": (32, 64, 96, 96),
    "decoder_block_out_channels": (48, 80, 112, 112),
    "layers_per_block": 1,
    "norm_num_groups": 8,
}
