"""Writes a Z-Image of random weights in the true layout, which diffusers loads too: every stage runs anywhere."""

from __future__ import annotations

from pathlib import Path

from stages.models.family import Family
from stages.models.random_model import qwen3, scheduler, write_model
from stages.models.z_image.autoencoder import AutoencoderConfig
from stages.models.z_image.transformer import SHIFT, TRANSFORMER_CLASS, ZImageConfig

# See `random_model.weight`.
GAINS: tuple[tuple[str, float], ...] = (
    (r"embed_tokens", 8.0),  # a table, not a product: 8 / sqrt(64) gives rows of unit variance
    (r"t_embedder", 2.0),  # a time embedding of unit variance after a sinusoid of variance 1/2 and a SiLU
    (r"final_layer.*modulation", 0.2),
    (r"modulation", 0.6),  # scales and gates
    (r"final_layer.*linear", 0.7),  # a velocity of about the size of noise
    (r"encoder\.conv_out", 5.0),  # latents of about unit variance once they are scaled
    (r"decoder\.conv_out", 0.7),  # pixels mostly within -1 to 1
    (r"", 1.0),
)
INDEX = {
    "_class_name": "ZImagePipeline",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3ForCausalLM"],
    "tokenizer": ["transformers", "Qwen2TokenizerFast"],
    "transformer": ["diffusers", TRANSFORMER_CLASS],
    "vae": ["diffusers", "AutoencoderKL"],
}


def write_random_weights(folder: Path, family: Family, seed: int) -> None:
    """A complete model in the diffusers layout. One seed gives the same bytes on every machine."""
    autoencoder = AutoencoderConfig.from_dict(family.autoencoder)
    levels = len(autoencoder.block_out_channels)
    blocks = {f"{way}_block_types": [f"{way.title()}{side}coderBlock2D"] * levels for way, side in (("down", "En"), ("up", "De"))}
    transformer = ZImageConfig.from_dict(family.transformer)
    components = {
        "transformer": ({"_class_name": TRANSFORMER_CLASS, **family.transformer}, transformer.shapes()),
        "autoencoder": ({"_class_name": "AutoencoderKL", **blocks, **family.autoencoder}, autoencoder.shapes()),
        "text_encoder": qwen3(family),
    }
    others = {"scheduler/scheduler_config.json": scheduler(SHIFT), "model_index.json": INDEX}
    write_model(folder, family, components, seed, GAINS, others)
