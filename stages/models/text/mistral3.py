"""Mistral Small 3, the text encoder of FLUX.2 dev. Its checkpoints hold a vision tower too, which is not read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from stages.models.text.decoder import DecoderConfig

# What the names of the decoder's weights begin with: in released files, as transformers names them, and in files of the text
# part alone. The first that fits counts.
DECODER = ("language_model.model.", "model.language_model.", "model.")
VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
HEADS = ("language_model.lm_head.", "model.lm_head.")


@dataclass(frozen=True)
class Mistral3Config(DecoderConfig):
    title = "Mistral Small 3"
    head_norms = False
    supported = {"attention_bias": False, "hidden_act": "silu", "sliding_window": None}  # noqa: RUF012  (never changed)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """`config` is that of the whole model or of its text part."""
        text = config.get("text_config", config)
        if not isinstance(text, Mapping):
            raise ValueError(f"the text encoder's config must have an object as text_config, got {text!r:.80}")
        return super().from_dict(text)

    @staticmethod
    def weight_name(key: str) -> str | None:
        """As in `DecoderConfig`; the output head keeps "lm_head.", and a name without known prefix stays."""
        if key.startswith(VISION):
            return None
        if head := next((prefix for prefix in HEADS if key.startswith(prefix)), ""):
            return "lm_head." + key[len(head) :]
        return next((key[len(prefix) :] for prefix in DECODER if key.startswith(prefix)), key)
