"""Loads a LoRA file with mflux' own loader into a small FLUX.2 transformer of zeros, and writes the merged weights.

    python tests/pipeline/commands/text_to_image/mflux_loader.py LORA OUT

runs in an environment that has mflux: `pip install mflux`, with a build of MLX that this machine can run.
"""

from __future__ import annotations

import sys

import mlx.core as mx
from mflux.models.common.lora.mapping.lora_loader import LoRALoader
from mflux.models.flux2.model.flux2_transformer.transformer import Flux2Transformer
from mflux.models.flux2.weights.flux2_lora_mapping import Flux2LoRAMapping
from mlx.utils import tree_flatten, tree_map

mx.set_default_device(mx.cpu)
transformer = Flux2Transformer(
    in_channels=16,
    num_layers=2,
    num_single_layers=2,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=24,
    timestep_guidance_channels=32,
    axes_dims_rope=(4, 4, 4, 4),
)
transformer.update(tree_map(mx.zeros_like, transformer.parameters()))
LoRALoader.load_and_apply_lora(Flux2LoRAMapping.get_mapping(), transformer, [sys.argv[1]], [1.0])
mx.save_safetensors(sys.argv[2], dict(tree_flatten(transformer.parameters())))
