"""Qwen3, the text encoder of FLUX.2 klein."""

from __future__ import annotations

from dataclasses import dataclass

from stages.models.text.decoder import DecoderConfig


@dataclass(frozen=True)
class Qwen3Config(DecoderConfig):
    """The sizes of a Qwen3 text encoder. The fields have the names of the model's config.json."""

    title = "Qwen3"
    head_norms = True
    supported = {"attention_bias": False, "hidden_act": "silu", "use_sliding_window": False}  # noqa: RUF012  (never changed)

    @staticmethod
    def weight_name(key: str) -> str:
        """Return the name of a Qwen3 weight without its prefix "model.". `key` is the name in the file. For example,
        "model.norm.weight" gives "norm.weight". A name without the prefix is returned unchanged.
        """
        return key.removeprefix("model.")
