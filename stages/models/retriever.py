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
    """A family of retrievers. A retriever encodes every token of a text as a vector. `sizes` is the content of
    config.json. If `lower_case` is True, texts are lower-cased before they are tokenised. `head_seed` is for weights
    without a projection head (the last linear layer). If it is a number, a head is drawn with this random seed. If it
    is None, weights without a head are an error.

    The sizes are used to write random weights, and to forecast memory while there are no weights. A drawn head must be
    trained before the retriever is of use. The weights lie in one folder, in the layout of transformers, with the head
    in 1_Dense or 2_Dense.
    """

    folders: ClassVar[Mapping[str, str]] = FOLDERS
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "encoder": ("config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model.bin", "[12]_Dense/*"),
        "tokenizer": ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "spiece.model"),
    }
    required: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "encoder": ("config.json", "1_Dense/config.json", "1_Dense/model.safetensors"),
        "tokenizer": ("tokenizer.json", "tokenizer_config.json"),
    }

    sizes: Mapping[str, Any] = field(default_factory=dict)
    lower_case: bool = False
    head_seed: int | None = None

    @property
    def architecture(self) -> RetrieverArchitecture:
        """An object that holds the functions of the family's architecture. They read the sizes of an encoder, load it,
        build it and write it to disk. MLX is imported when this is first read.
        """
        found: RetrieverArchitecture = super().architecture
        return found
