"""Qwen3's decoder as a text encoder: hidden states of its lower layers, and only those layers.

Hidden state k is the residual stream after k layers, and after the last of all it is normalised, as transformers gives
it; 0 would be the embedding. Names of tensors are those of a Qwen3 checkpoint without their leading `model.`.

B batch, T tokens, D hidden, H query heads, G key and value heads (H is a multiple of G), K head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from stages.models.attention import attention

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
)
# What a Qwen3 config may say that this file does not compute, with the value that it does.
BUILT = {"attention_bias": False, "hidden_act": "silu", "use_sliding_window": False}


@dataclass(frozen=True)
class Qwen3Config:
    """The sizes that decide the architecture, with the names of its config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Qwen3Config:
        """From a config.json, old (`rope_theta`) or new (`rope_parameters`). ValueError for what is missing or not built."""
        missing = [name for name in SIZES if name not in config]
        if missing:
            raise ValueError(f"the text encoder's config lacks {', '.join(missing)}; is it a Qwen3 model?")
        odd = [f"{name} = {config[name]!r}" for name, built in BUILT.items() if config.get(name, built) != built]
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            odd.append(f"rope_type = {kind!r}")
        if odd:
            raise ValueError(f"the text encoder's config has {', '.join(odd)}, which FLUX.2's Qwen3 does not have")
        theta = rope.get("rope_theta", config.get("rope_theta"))
        if theta is None:
            raise ValueError("the text encoder's config lacks rope_theta")
        return cls(rope_theta=float(theta), **{name: config[name] for name in SIZES})

    def shapes(self, layers: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the embedding and of the first `layers` layers, all of them with the final norm: what hidden
        state `layers` needs.
        """
        D, K, inner = self.hidden_size, self.head_dim, self.intermediate_size
        query, shared = self.num_attention_heads * K, self.num_key_value_heads * K
        layer = {
            "input_layernorm": (D,),
            "self_attn.q_proj": (query, D),
            "self_attn.k_proj": (shared, D),
            "self_attn.v_proj": (shared, D),
            "self_attn.o_proj": (D, query),
            "self_attn.q_norm": (K,),
            "self_attn.k_norm": (K,),
            "post_attention_layernorm": (D,),
            "mlp.gate_proj": (inner, D),
            "mlp.up_proj": (inner, D),
            "mlp.down_proj": (D, inner),
        }
        if layers > self.num_hidden_layers:
            raise ValueError(f"hidden state {layers} is wanted of a text encoder of {self.num_hidden_layers} layers")
        named = {f"layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in layer.items()}
        final = {"norm.weight": (D,)} if layers == self.num_hidden_layers else {}
        return {"embed_tokens.weight": (self.vocab_size, D), **named, **final}


def rename(key: str) -> str:
    """A checkpoint's key as this file names it."""
    return key.removeprefix("model.")


def beyond(layers: int, of: int) -> Callable[[str], bool]:
    """Which renamed keys hidden state `layers` of a model of `of` does not need: later layers, their norm, the output head."""

    def unneeded(key: str) -> bool:
        if key in ("norm.weight", "lm_head.weight"):
            return key != "norm.weight" or layers < of
        head, _, rest = key.partition("layers.")
        number = rest.partition(".")[0]
        return head == "" and number.isdecimal() and int(number) >= layers

    return unneeded


def mask(real_BT: mx.array) -> mx.array:
    """Who may be looked at, (B,1,T,T) boolean: no later token, and no padding. Padding looks at the real tokens too.

    With padding on the right the first token is real, so no row is empty.
    """
    T = real_BT.shape[1]
    place_T = mx.arange(T)
    causal_TT = place_T[:, None] >= place_T[None, :]
    return causal_TT[None, None] & real_BT[:, None, None, :]


class Qwen3:
    """The decoder. `weights` has at least the names of `config.shapes(layers)` for the deepest layer asked for."""

    def __init__(self, config: Qwen3Config, weights: Mapping[str, mx.array]) -> None:
        self.config = config
        self.weights = weights

    def encode(self, tokens_BT: mx.array, real_BT: mx.array, layers: Sequence[int]) -> mx.array:
        """Hidden states `layers`, side by side in that order: (B,T,len(layers)*D). `real` is False for padding."""
        h_BTD = self.weights["embed_tokens.weight"][tokens_BT]
        seen_B1TT = mask(real_BT)
        states = {0: h_BTD}
        for i in range(max(layers)):
            h_BTD = self._layer(i, h_BTD, seen_B1TT)
            states[i + 1] = h_BTD if i + 1 < self.config.num_hidden_layers else self._norm("norm", h_BTD)
        return mx.concatenate([states[k] for k in layers], axis=-1)

    def _layer(self, i: int, h_BTD: mx.array, seen_B1TT: mx.array) -> mx.array:
        h_BTD = h_BTD + self._attend(f"layers.{i}.self_attn", self._norm(f"layers.{i}.input_layernorm", h_BTD), seen_B1TT)
        return h_BTD + self._feed(f"layers.{i}.mlp", self._norm(f"layers.{i}.post_attention_layernorm", h_BTD))

    def _attend(self, name: str, x_BTD: mx.array, seen_B1TT: mx.array) -> mx.array:
        c = self.config
        q_BHTK = self._heads(f"{name}.q", x_BTD, c.num_attention_heads)
        k_BGTK = self._heads(f"{name}.k", x_BTD, c.num_key_value_heads)
        v_BTGK = self._linear(f"{name}.v_proj", x_BTD).reshape(*x_BTD.shape[:2], c.num_key_value_heads, c.head_dim)
        out_BHTK = attention(q_BHTK, k_BGTK, v_BTGK.transpose(0, 2, 1, 3), c.head_dim**-0.5, seen_B1TT)
        return self._linear(f"{name}.o_proj", out_BHTK.transpose(0, 2, 1, 3).reshape(*x_BTD.shape[:2], -1))

    def _heads(self, name: str, x_BTD: mx.array, heads: int) -> mx.array:
        """Queries or keys: projected, normalised head by head, then turned by their position (halves, not neighbours)."""
        c = self.config
        x_BTHK = self._linear(f"{name}_proj", x_BTD).reshape(*x_BTD.shape[:2], heads, c.head_dim)
        x_BHTK = self._norm(f"{name}_norm", x_BTHK).transpose(0, 2, 1, 3)
        return mx.fast.rope(x_BHTK, c.head_dim, traditional=False, base=c.rope_theta, scale=1.0, offset=0)

    def _feed(self, name: str, x_BTD: mx.array) -> mx.array:
        gate = self._linear(f"{name}.gate_proj", x_BTD)
        return self._linear(f"{name}.down_proj", gate * mx.sigmoid(gate) * self._linear(f"{name}.up_proj", x_BTD))

    def _norm(self, name: str, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    def _linear(self, name: str, x: mx.array) -> mx.array:
        return x @ self.weights[f"{name}.weight"].T
