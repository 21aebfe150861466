"""What stages and the tuner may expect of any transformer, autoencoder and text encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import mlx.core as mx


Shape = tuple[int, ...]


class TransformerConfig(Protocol):
    """The sizes of a transformer that an estimate of its memory needs."""

    @property
    def num_attention_heads(self) -> int:
        """The number of attention heads of every block."""

    @property
    def attention_head_dim(self) -> int:
        """The width of one attention head, in values."""

    def shapes(self) -> dict[str, Shape]:
        """Return the name and shape of every weight."""


class Transformer(Protocol):
    """A transformer as a chain of blocks. `model(**inputs, linear_for=...)` runs all of it and returns the velocity. Step by
    step it is `h, shared = model.enter(**inputs)`, then `h = model.block(b.kind)(b.weights, h, shared, linear)` for each block
    b, then `model.leave(h, shared)`. `inputs` come from `Architecture.inputs`.
    """

    @property
    def config(self) -> Any:
        """The sizes of the transformer, an object like TransformerConfig."""

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype in which the transformer computes."""

    @property
    def blocks(self) -> Sequence[Any]:
        """The blocks in the order of computation. Each has a `kind`, a `name` such as "transformer_blocks.0", and `weights`:
        name within the block -> array.
        """

    @property
    def enter(self) -> Callable[..., tuple[Any, Any]]:
        """The function that starts a forward pass: enter(**inputs) returns (h, shared), the input of the first block and the
        values that all blocks use.
        """

    @property
    def leave(self) -> Callable[..., mx.array]:
        """The function that ends a forward pass: leave(h, shared) returns the velocity of the image tokens, (batch, tokens,
        channels). `h` is the output of the last block.
        """

    def block(self, kind: str) -> Callable[..., Any]:
        """Return the function that computes blocks of one kind: function(weights, h, shared, linear) -> h. Its result depends
        on its arguments alone.
        """

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return the size of every Linear in the blocks, which an adapter can change: full name -> (outputs, inputs)."""


class Autoencoder(Protocol):
    """A network that encodes images to latents and decodes latents to images."""

    def encode(self, images_BHWC: mx.array) -> mx.array:
        """Return the latents of images, float32, shape (batch, channels, height / 16, width / 16). images_BHWC has the shape
        (batch, height, width, 3) and values from -1 to 1.
        """

    def decode(self, latents_BChw: mx.array) -> mx.array:
        """Return the images of latents, float32, shape (batch, height, width, 3). Values are about -1 to 1 but not clipped.
        latents_BChw has the shape (batch, channels, height / 16, width / 16).
        """


class TextEncoder(Protocol):
    """A network that turns texts into embeddings."""

    def encode(self, texts: list[str]) -> Iterator[Any]:
        """Encode the texts one by one and yield a `stages.models.text.encoder.Embedding` for each, in order."""
