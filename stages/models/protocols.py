"""What stages and the tuner may expect of any transformer, autoencoder and text encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import mlx.core as mx


Shape = tuple[int, ...]


class TransformerConfig(Protocol):
    @property
    def num_attention_heads(self) -> int:
        """Heads of every block."""

    @property
    def attention_head_dim(self) -> int:
        """Width of a head."""

    def shapes(self) -> dict[str, Shape]:
        """Shape of every weight, by full name."""


class Transformer(Protocol):
    """A transformer that is computed block by block.

        h, shared = model.enter(**inputs)
        for b in model.blocks:
            h = model.block(b.kind)(b.weights, h, shared, linear)
        velocity = model.leave(h, shared)

    `model(**inputs, linear_for=f)` does all of it, with `linear = f(b.name)`. `linear(name, weight, x)` computes one Linear of
    a block; an adapter replaces it. `inputs` is what `Architecture.inputs` returns.
    """

    @property
    def config(self) -> Any:
        """The sizes, with the attributes of `TransformerConfig`."""

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of the computation."""

    @property
    def blocks(self) -> Sequence[Any]:
        """In order, each with `kind`, `name` (transformer_blocks.0) and `weights`, by name within the block."""

    @property
    def enter(self) -> Callable[..., tuple[Any, Any]]:
        """enter(**inputs) -> (input of the first block, what all blocks read)."""

    @property
    def leave(self) -> Callable[..., mx.array]:
        """leave(h, shared) -> velocity of the image tokens, (B, L, C)."""

    def block(self, kind: str) -> Callable[..., Any]:
        """function(weights, h, shared, linear) -> output of a block of this kind, which depends on the arguments alone."""

    def linears(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of every Linear in the blocks, by full name. An adapter can change these."""


class Autoencoder(Protocol):
    def encode(self, images_BHWC: mx.array) -> mx.array:
        """(B, H, W, 3) from -1 to 1 -> float32 (B, C, H / 16, W / 16)."""

    def decode(self, latents_BChw: mx.array) -> mx.array:
        """(B, C, h, w) -> float32 (B, 16 h, 16 w, 3), about -1 to 1, not clipped."""


class TextEncoderSizes(Protocol):
    @property
    def vocab_size(self) -> int:
        """Rows of the token embedding."""

    @property
    def hidden_size(self) -> int:
        """Features of a hidden state."""

    @property
    def intermediate_size(self) -> int:
        """Features inside a feed-forward."""

    @property
    def num_attention_heads(self) -> int:
        """Heads of every layer."""

    def shapes(self, layers: int) -> dict[str, Shape]:
        """Shapes of what the first `layers` layers need, embedding included; in layers, names start with "layers."."""


class TextEncoder(Protocol):
    def encode(self, texts: list[str]) -> Iterator[Any]:
        """One `stages.models.text.encoder.Embedding` per text, in order."""
