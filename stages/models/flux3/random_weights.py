"""Writes a FLUX 3 Image of random weights in the true layout: every stage runs anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.models.family import Family
from stages.models.flux2.autoencoder import random_autoencoder
from stages.models.flux2.random_weights import GAINS
from stages.models.flux3.transformer import SHIFT, TRANSFORMER_CLASS, Flux3Config
from stages.models.random_model import QWEN3, Component, scheduler, write_model
from stages.models.text.decoder import Qwen3VLConfig

INDEX = {  # diffusers has a modular pipeline for it
    "_class_name": "Flux3ModularPipeline",
    "_blocks_class_name": "Flux3AutoBlocks",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
    "transformer": ["diffusers", TRANSFORMER_CLASS],
    "vae": ["diffusers", "AutoencoderKLFlux2"],
}


def write_random_weights(folder: Path, family: Family, seed: int) -> None:
    """A complete model in the diffusers layout. One seed gives the same bytes on every machine."""
    transformer = Flux3Config.from_dict(family.transformer)
    components = {
        "transformer": ({"_class_name": TRANSFORMER_CLASS, **family.transformer}, transformer.shapes()),
        "autoencoder": random_autoencoder(family),
        "text_encoder": _text_encoder(family.text_encoder),
    }
    others = {"scheduler/scheduler_config.json": scheduler(SHIFT), "model_index.json": INDEX}
    write_model(folder, family, components, seed, GAINS, others)


def _text_encoder(sizes: Mapping[str, Any]) -> Component:
    qwen3 = Qwen3VLConfig.from_dict(sizes)
    shapes = {f"model.language_model.{name}": shape for name, shape in qwen3.shapes(qwen3.num_hidden_layers).items()}
    whole = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "tie_word_embeddings": True}
    text = {name: value for name, value in {**sizes, **QWEN3}.items() if name != "architectures"}
    # Without weights: nothing reads them.
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "deepstack_visual_indexes": [0]}
    return {**whole, "text_config": text, "vision_config": {**vision, "out_hidden_size": sizes["hidden_size"]}}, shapes
