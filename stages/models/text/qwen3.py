"""Qwen3, the text encoder of FLUX.2 klein."""

from __future__ import annotations

from dataclasses import dataclass

from stages.models.text.decoder import DecoderConfig


@dataclass(frozen=True)
class Qwen3Config(DecoderConfig):
    title = "Qwen3"
    head_norms = True
    supported = {"attention_bias": False, "hidden_act": "silu", "use_sliding_window": False}  # noqa: RUF012  (never changed)

    @staticmethod
    def weight_name(key: str) -> str:
        return key.removeprefix("model.")
