"""The record of a model family: what tells one family from another, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# A family's components and where each lies in a folder of the diffusers layout.
FOLDERS = {"transformer": "transformer", "autoencoder": "vae", "text_encoder": "text_encoder", "tokenizer": "tokenizer"}


@dataclass(frozen=True)
class Family:
    """One family. `transformer`, `autoencoder` and `text_encoder` use the names of the released config files."""

    name: str
    title: str
    licence: str
    transformer: Mapping[str, Any]
    text_encoder: Mapping[str, Any]
    autoencoder: Mapping[str, Any] = field(default_factory=dict)
    hub: str = ""  # hub id of the weights, diffusers layout; empty: none is published
    gated: bool = False  # the licence must be accepted before the hub serves the files
    single_files: tuple[str, ...] = ()  # names of the transformer as one file, BFL layout
    text_kind: str = "qwen3"  # architecture and prompt form of the text encoder
    text_layers: tuple[int, ...] = (9, 18, 27)  # hidden states that are concatenated; 0 would be the embedding
    text_tokens: int = 512  # rows of an embedding, padding included
    guidance_embedded: bool = False  # guidance is an input of the transformer
    real_cfg: bool = True  # guidance is two passes, with and without the prompt
    distilled: bool = False  # made for few steps; LoRAs are trained on the base model instead
    guidance: float = 4.0  # default when sampling
    sampling_steps: int = 50  # default when sampling
    bundled: str = ""  # folder of the weights in the checkout, where they are part of it
    seeded: int | None = None  # seed, where the project makes the weights itself
    bytes_bf16: Mapping[str, int] = field(default_factory=dict)  # component -> bytes as bfloat16, the layers needed
    unsupported: Mapping[str, str] = field(default_factory=dict)  # component -> why it cannot be used yet, in one line
    begin: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # section -> settings with which a new project begins

    @property
    def source(self) -> str:
        """Where the weights come from where a project names none, in words."""
        return self.hub or (f"{self.bundled}, part of the checkout" if self.bundled else "made by the project")
