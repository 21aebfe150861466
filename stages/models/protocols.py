"""What stages and the tuner may expect of any transformer, autoencoder and text encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import mlx.core as mx


Shape = tuple[int, ...]


class TransformerConfig(Protocol):
    """The sizes of a transformer. An estimate of its memory needs them."""

    @property
    def num_attention_heads(self) -> int:
        """The number of attention heads of every block."""

    @property
    def attention_head_dim(self) -> int:
        """The width of one attention head, in values."""

    def shapes(self) -> dict[str, Shape]:
        """Return a dict from the full name of every weight to its shape."""


class Transformer(Protocol):
    """A transformer that is computed as a chain of blocks. `model(**inputs)` computes the whole model and returns the
    predicted velocity. `inputs` is the dict that `Architecture.inputs` returns. To apply an adapter, also pass the
    function `linear_for`. `linear_for(block_name)` returns a function `linear(name, weight, x)`. This function computes
    the Linear `name` of that block.

    To compute the blocks one by one, call `h, shared = model.enter(**inputs)` first. Then call
    `h = model.block(b.kind)(b.weights, h, shared, linear)` for each block `b` in `model.blocks`. At the end,
    `model.leave(h, shared)` returns the velocity.
    """

    @property
    def config(self) -> Any:
        """The sizes of the transformer. The object has the attributes of `TransformerConfig`."""

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype in which the transformer computes."""

    @property
    def blocks(self) -> Sequence[Any]:
        """The blocks in the order of computation. Each has a `kind`, a `name` and `weights`. For example, a `name` is
        "transformer_blocks.0". `weights` maps names within the block to arrays.
        """

    @property
    def enter(self) -> Callable[..., tuple[Any, Any]]:
        """The function that starts a forward pass. enter(**inputs) returns (h, shared). `h` is the input of the first block.
        `shared` is the values that all blocks use.
        """

    @property
    def leave(self) -> Callable[..., mx.array]:
        """The function that ends a forward pass. leave(h, shared) returns the velocity of the image tokens, (batch, tokens,
        channels). `h` is the output of the last block.
        """

    def block(self, kind: str) -> Callable[..., Any]:
        """Return the function that computes blocks of one kind. `kind` is the `kind` of a block in `blocks`. Call the
        function as `function(weights, h, shared, linear)`. It returns the new `h`. `weights` is the `weights` of the
        block. `h` and `shared` come from `enter`. `linear(name, weight, x)` computes one Linear of the block. The
        result depends on the arguments alone.
        """

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return the size of every Linear in the blocks: full name -> (outputs, inputs). An adapter can change these Linears."""


class Autoencoder(Protocol):
    """A network that encodes images to latents and decodes latents to images."""

    def encode(self, images_BHWC: mx.array) -> mx.array:
        """Return the latents of images, float32, (batch, channels, height / 16, width / 16). images_BHWC is (batch, height,
        width, 3) with values from -1 to 1.
        """

    def decode(self, latents_BChw: mx.array) -> mx.array:
        """Return the images of latents, float32, (batch, height, width, 3). Values are about -1 to 1 and are not clipped.
        latents_BChw is (batch, channels, height / 16, width / 16).
        """


class TextEncoderSizes(Protocol):
    """The sizes of a text encoder. An estimate of its memory needs them."""

    @property
    def vocab_size(self) -> int:
        """The number of rows of the token embedding."""

    @property
    def hidden_size(self) -> int:
        """The number of features of a hidden state."""

    @property
    def intermediate_size(self) -> int:
        """The number of features inside a feed-forward layer."""

    @property
    def num_attention_heads(self) -> int:
        """The number of attention heads of every layer."""

    def shapes(self, layers: int) -> dict[str, Shape]:
        """Return a dict from the name of every weight that the first `layers` layers need to its shape. Names of weights in
        layers start with "layers.".
        """


class TextEncoder(Protocol):
    """A network that turns texts into embeddings."""

    def encode(self, texts: list[str]) -> Iterator[Any]:
        """Encode the texts one by one, in order. Yield a `stages.models.text.encoder.Embedding` for each."""
