"""The sizes of a T5 encoder and of its projection head, and the shapes of all their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stages.models.sizes import checked_sizes

Shape = tuple[int, ...]

SIZES = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads")
# Names of activations in a config.json -> the form of the feed-forward: (gated, activation).
FEED_FORWARDS = {"relu": (False, "relu"), "gated-gelu": (True, "gelu_new")}
BIAS = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
EMBEDDING, FINAL_NORM = "shared.weight", "encoder.final_layer_norm.weight"
HEAD = "head.linear.weight"  # the projection; its file names it linear.weight


@dataclass(frozen=True)
class T5Config:
    """Fields have the names of config.json, but for `gated` and `dimensions`."""

    vocab_size: int
    d_model: int
    d_kv: int
    d_ff: int
    num_layers: int
    num_heads: int
    gated: bool  # T5 v1.1: gelu(h W0) * (h W1) in the feed-forward; else relu(h W)
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    dimensions: int = 128  # width of a token vector, the output of the head

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], dimensions: int = 128) -> T5Config:
        """Raises ValueError if a size is missing, or the feed-forward is not that of T5 v1.0 or v1.1."""
        missing = [name for name in SIZES if name not in config]
        if missing:
            raise ValueError(f"the encoder's config lacks {', '.join(missing)}; is it a T5 model?")
        kind = config.get("feed_forward_proj", "relu")
        if kind not in FEED_FORWARDS:
            raise ValueError(f"feed_forward_proj of the encoder must be relu or gated-gelu, got {kind!r}")
        gated, activation = FEED_FORWARDS[kind]
        given = config.get("dense_act_fn", activation)
        if given != activation:
            raise ValueError(f"dense_act_fn of the encoder must be {activation} with {kind}, got {given!r}")
        more = ("relative_attention_num_buckets", "relative_attention_max_distance", "layer_norm_epsilon")
        sizes = checked_sizes(cls, {name: config[name] for name in (*SIZES, *more) if name in config}, "the encoder's config")
        return cls(**sizes, gated=gated, dimensions=dimensions)

    def to_dict(self) -> dict[str, Any]:
        """The content of a config.json that transformers reads."""
        sizes = {name: getattr(self, name) for name in SIZES}
        return {
            "architectures": ["T5EncoderModel"],
            "model_type": "t5",
            **sizes,
            "num_decoder_layers": self.num_layers,
            "feed_forward_proj": "gated-gelu" if self.gated else "relu",
            "is_gated_act": self.gated,
            "dense_act_fn": "gelu_new" if self.gated else "relu",
            "relative_attention_num_buckets": self.relative_attention_num_buckets,
            "relative_attention_max_distance": self.relative_attention_max_distance,
            "layer_norm_epsilon": self.layer_norm_epsilon,
            "dropout_rate": 0.1,
            "is_encoder_decoder": False,
            "use_cache": False,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "eos_token_id": 1,
        }

    def block_shapes(self) -> dict[str, Shape]:
        """By name within the block."""
        D, inner, F = self.d_model, self.num_heads * self.d_kv, self.d_ff
        attention = {f"layer.0.SelfAttention.{name}": (inner, D) for name in ("q", "k", "v")}
        forward = {"wi_0": (F, D), "wi_1": (F, D), "wo": (D, F)} if self.gated else {"wi": (F, D), "wo": (D, F)}
        shapes: dict[str, Shape] = {
            **attention,
            "layer.0.SelfAttention.o": (D, inner),
            "layer.0.layer_norm": (D,),
            **{f"layer.1.DenseReluDense.{name}": shape for name, shape in forward.items()},
            "layer.1.layer_norm": (D,),
        }
        return {f"{name}.weight": shape for name, shape in shapes.items()}

    def encoder_shapes(self) -> dict[str, Shape]:
        """Without the head."""
        blocks = {f"{block_name(n)}.{name}": shape for n in range(self.num_layers) for name, shape in self.block_shapes().items()}
        table = (self.relative_attention_num_buckets, self.num_heads)
        return {EMBEDDING: (self.vocab_size, self.d_model), BIAS: table, **blocks, FINAL_NORM: (self.d_model,)}

    def shapes(self) -> dict[str, Shape]:
        return {**self.encoder_shapes(), HEAD: (self.dimensions, self.d_model)}


def block_name(number: int) -> str:
    return f"encoder.block.{number}"
