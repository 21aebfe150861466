"""What stages and the tuner may expect of any transformer, autoencoder and text encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import mlx.core as mx


Shape = tuple[int, ...]


class TransformerConfig(Protocol):
    """The sizes of a transformer, from which its memory use is estimated. It has the number of heads, the width of a
    head, and the shapes of all weights.
    """

    @property
    def num_attention_heads(self) -> int:
        """The number of attention heads of every block."""

    @property
    def attention_head_dim(self) -> int:
        """The width of one attention head, in values."""

    def shapes(self) -> dict[str, Shape]:
        """Return a dict from the full name of every weight to its shape."""


class Transformer(Protocol):
    """A transformer that is computed block by block. `model(**inputs)` returns the velocity that the model predicts.
    `inputs` is the dict that `Architecture.inputs` returns. To apply an adapter, also pass `linear_for=function`. This
    function takes the name of a block. It returns the function `linear(name, weight, x)` that computes the block's
    linear layers.

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
        """The transformer's blocks in the order of computation. Each block has three attributes. `kind` is the kind of
        block. `name` is its name, such as "transformer_blocks.0". `weights` is a dict from name within the block to
        array.
        """

    @property
    def enter(self) -> Callable[..., tuple[Any, Any]]:
        """The function `enter(**inputs)` that starts a forward pass. It returns the pair `(h, shared)`. `h` is the
        input of the first block. `shared` holds values that every block uses. `inputs` holds the model's inputs by
        name, such as the noisy latents. `Architecture.inputs` makes this dict.
        """

    @property
    def leave(self) -> Callable[..., mx.array]:
        """The function `leave(h, shared)` that ends a forward pass. It returns the predicted velocity of the image
        tokens, (batch, tokens, channels). `h` is the output of the last block. `shared` is the second value of the pair
        that `enter` returned.
        """

    def block(self, kind: str) -> Callable[..., Any]:
        """Return the function that computes the blocks of one kind. `kind` is the attribute `kind` of a block, such as
        "double". The returned function takes four arguments, `function(weights, h, shared, linear)`, and returns the
        output of the block. `weights` is the attribute `weights` of the block. `h` is the output of the previous block.
        `shared` holds the values that all blocks use; `enter` returns it in the pair `(h, shared)`. `linear(name,
        weight, x)` is a function that you pass to compute each linear layer of the block.

        `linear` returns the output of the layer called `name` for the input `x`. For example, it returns `x @
        weight.T`, or this product with the change of an adapter. For the first block, `h` is the first value that
        `enter` returns. The result depends on the arguments alone.
        """

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return the size of every Linear in the blocks: full name -> (outputs, inputs). An adapter can change these Linears."""


class Autoencoder(Protocol):
    """A network that encodes images to latents and decodes latents to images. Its methods are `encode` and `decode`,
    and both take a batch.
    """

    def encode(self, images_BHWC: mx.array) -> mx.array:
        """Encode images to latents, and return the latents. `images_BHWC` is (batch, height, width, 3) with values from
        -1 to 1. The result is (batch, channels, height / 16, width / 16), float32.
        """

    def decode(self, latents_BChw: mx.array) -> mx.array:
        """Decode latents to images, and return the images. `latents_BChw` is (batch, channels, height / 16, width /
        16). The result is (batch, height, width, 3), float32. Its values are about -1 to 1. They are not clipped.
        """


class TextEncoderSizes(Protocol):
    """The sizes of a text encoder, from which its memory use is estimated. It has the vocabulary size, two layer
    widths, the number of heads, and the shapes of the weights.
    """

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
        """Return the shapes of the weights that the first `layers` layers need, as a dict. A key is the weight's name.
        Names of weights in layers start with "layers.". Weights outside the layers, such as the token embedding, are
        included.
        """


class TextEncoder(Protocol):
    """A network that turns texts into embeddings. `encode(texts)` yields one embedding per text."""

    def encode(self, texts: list[str]) -> Iterator[Any]:
        """Encode texts one by one, and yield one `stages.models.text.encoder.Embedding` for each, in order. An
        `Embedding` holds the values, (tokens with padding, features), and the number of tokens.
        """
