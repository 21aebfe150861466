"""What stages and the tuner may expect of any transformer, autoencoder and text encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import mlx.core as mx


Shape = tuple[int, ...]


class TransformerConfig(Protocol):
    """The sizes of a transformer, as the memory estimate needs them."""

    @property
    def num_attention_heads(self) -> int:
        """Attention heads of every block."""

    @property
    def attention_head_dim(self) -> int:
        """Width of one attention head."""

    def shapes(self) -> dict[str, Shape]:
        """Return the name and shape of every weight."""


class Transformer(Protocol):
    """A transformer as a chain of blocks: enter, every block in order, leave.
    `h, shared = model.enter(**inputs)`, then `h = model.block(b.kind)(b.weights, h, shared, linear)` for each block b, then
    `velocity_BLC = model.leave(h, shared)`. `model(**inputs, linear_for=...)` does all of it.
    """

    @property
    def config(self) -> Any:
        """The sizes of the transformer, an object like TransformerConfig."""

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype that the transformer computes in."""

    @property
    def blocks(self) -> Sequence[Any]:
        """The blocks in order. Each has `kind`, `name` ("transformer_blocks.0") and `weights`, named within the block."""

    @property
    def enter(self) -> Callable[..., tuple[Any, Any]]:
        """(**inputs) -> (h, shared): the input of the first block, and what all blocks share."""

    @property
    def leave(self) -> Callable[..., mx.array]:
        """(h, shared) -> the velocity of the image tokens: (batch, tokens, channels)."""

    def block(self, kind: str) -> Callable[..., Any]:
        """The function (weights, h, shared, linear) -> h of one kind of block. It depends on its arguments alone."""

    def linears(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of every Linear within a block, by its full name: what an adapter can adapt."""


class Autoencoder(Protocol):
    """An autoencoder: it encodes images to latents and decodes latents to images."""

    def encode(self, images_BHWC: mx.array) -> mx.array:
        """Encode images (batch, height, width, 3), -1 to 1, to float32 latents (batch, channels, height / 16, width / 16)."""

    def decode(self, latents_BChw: mx.array) -> mx.array:
        """Decode latents to images (batch, height, width, 3), float32, about -1 to 1 but not clipped."""


class TextEncoder(Protocol):
    """A text encoder: it turns texts into embeddings."""

    def encode(self, texts: list[str]) -> Iterator[Any]:
        """Encode the texts one by one, in order. Yields `stages.models.text.encoder.Embedding`."""
