"""Writes a FLUX.2 klein of random weights in the true layout, which diffusers loads too: every stage runs anywhere."""

from __future__ import annotations

import functools
from pathlib import Path

from stages.models import random_model
from stages.models.family import Family
from stages.models.flux2.autoencoder import random_autoencoder
from stages.models.flux2.transformer import TRANSFORMER_CLASS, Flux2Config
from stages.models.random_model import qwen3, scheduler, write_model

# See `random_model.weight`. These keep every stream near unit variance through depth, and outputs in range.
GAINS: tuple[tuple[str, float], ...] = (
    (r"embed_tokens", 8.0),  # a table, not a product: 8 / sqrt(64) gives rows of unit variance
    (r"_embedder\.linear", 2.0),  # a time embedding of unit variance after a sinusoid of variance 1/2 and two SiLUs
    (r"modulation", 0.6),  # shifts, scales and gates
    (r"norm_out", 0.2),
    (r"proj_out", 0.7),  # a velocity of about the size of noise
    (r"encoder\.conv_out", 1.5),  # latents of about unit variance after the statistics below
    (r"decoder\.conv_out", 0.7),  # pixels mostly within -1 to 1
    (r"", 1.0),
)
weight = functools.partial(random_model.weight, gains=GAINS)

SCHEDULER = scheduler(
    3.0, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=4096, time_shift_type="exponential"
)
INDEX = {
    "_class_name": "Flux2KleinPipeline",
    "is_distilled": False,
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3ForCausalLM"],
    "tokenizer": ["transformers", "Qwen2TokenizerFast"],
    "transformer": ["diffusers", TRANSFORMER_CLASS],
    "vae": ["diffusers", "AutoencoderKLFlux2"],
}


def write_random_weights(folder: Path, family: Family, seed: int) -> None:
    """A complete model in the diffusers layout. One seed gives the same bytes on every machine."""
    components = {
        "transformer": (
            {"_class_name": TRANSFORMER_CLASS, **family.transformer},
            Flux2Config.from_dict(family.transformer).shapes(),
        ),
        "autoencoder": random_autoencoder(family),
        "text_encoder": qwen3(family),
    }
    others = {"scheduler/scheduler_config.json": SCHEDULER, "model_index.json": INDEX}
    write_model(folder, family, components, seed, GAINS, others)
