"""The record of a family of retrievers: encoders that give a vector for every token of a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from stages.models.family import ModelFamily

if TYPE_CHECKING:
    from stages.models.t5.architecture import RetrieverArchitecture

FOLDERS = {"encoder": "", "tokenizer": ""}  # all files lie beside each other, as transformers writes them


@dataclass(frozen=True, kw_only=True)
class RetrieverFamily(ModelFamily):
    """Weights lie in one folder, in the layout of transformers, with the projection head in 1_Dense or 2_Dense."""

    folders: ClassVar[Mapping[str, str]] = FOLDERS
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "encoder": ("config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model.bin", "[12]_Dense/*"),
        "tokenizer": ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "spiece.model"),
    }
    required: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "encoder": ("config.json", "1_Dense/config.json", "1_Dense/model.safetensors"),
        "tokenizer": ("tokenizer.json", "tokenizer_config.json"),
    }

    sizes: Mapping[str, Any] = field(default_factory=dict)  # content of config.json, for random weights and forecasts of memory
    lower_case: bool = False  # texts, before they are tokenised
    head_seed: int | None = None  # draws a head for weights without one, to be trained before use; None: that is an error

    @property
    def architecture(self) -> RetrieverArchitecture:
        found: RetrieverArchitecture = super().architecture
        return found
