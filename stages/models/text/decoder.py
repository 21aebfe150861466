"""A decoder as a text encoder: the layers of Qwen3 and of Mistral, as many as the hidden states need.

Hidden state k is the residual stream after k layers; after the model's last layer it is normalised, as in transformers. Names
of weights start at the decoder: "embed_tokens.", "layers." or "norm.". B batch, T tokens, D hidden width, H query heads, G key
and value heads (H is a multiple of G), K head width.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import mlx.core as mx

from stages import kernels
from stages.models.attention import attention, silu
from stages.models.folders import checked_sizes

IN_FLIGHT = 2  # layers that are computed at once: a GPU computes one while the next is prepared


@dataclass(frozen=True)
class DecoderConfig:
    """Fields have the names of config.json."""

    title: ClassVar[str]  # of the architecture, in messages
    kinds: ClassVar[tuple[str, ...]] = ()  # supported values of model_type; (): it is not read
    # Whether weights have the names of a model with a vision part, which then say what they are; None: both occur.
    vision: ClassVar[bool | None] = None
    head_norms: ClassVar[bool]  # queries and keys are normalised per head
    padding_at: ClassVar[int | None] = None  # position of all padding at the end; None: positions count on
    supported: ClassVar[Mapping[str, Any]]  # further field of config.json -> its only supported value

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
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """`config` is that of the whole model or of its text part. Reads `rope_theta` and the newer `rope_parameters`. Raises
        ValueError if a field is missing or not supported.
        """
        text = config.get("text_config", config)
        if not isinstance(text, Mapping):
            raise ValueError(f"the text encoder's config must have an object as text_config, got {text!r:.80}")
        kind = config.get("model_type")
        odd = [f"model_type = {kind!r:.80}"] if cls.kinds and kind is not None and kind not in cls.kinds else []
        config = text
        odd += [f"{name} = {config[name]!r}" for name, value in cls.supported.items() if config.get(name, value) != value]
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise ValueError(f"the text encoder's config must have an object as rope_parameters, got {rope!r:.80}")
        theta = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
        made = cls(**checked_sizes(cls, {**config, **theta}, "the text encoder's config", cls.title))
        scaling = rope.get("rope_type", rope.get("type", "default"))
        if scaling != "default":
            odd.append(f"rope_type = {scaling!r}")
        if odd:
            raise ValueError(f"the text encoder's config has {', '.join(odd)}, which this family's {cls.title} does not have")
        if made.num_attention_heads % made.num_key_value_heads or made.head_dim % 2:
            raise ValueError(
                "the text encoder's config must have an even head_dim, and as num_attention_heads a multiple of "
                f"num_key_value_heads, got {made.head_dim}, {made.num_attention_heads} and {made.num_key_value_heads}"
            )
        return made

    def shapes(self, layers: int) -> dict[str, tuple[int, ...]]:
        """What the hidden state after `layers` layers needs, by name. Raises ValueError if the model has fewer layers."""
        D, K, inner = self.hidden_size, self.head_dim, self.intermediate_size
        query, shared = self.num_attention_heads * K, self.num_key_value_heads * K
        layer = {
            "input_layernorm": (D,),
            "self_attn.q_proj": (query, D),
            "self_attn.k_proj": (shared, D),
            "self_attn.v_proj": (shared, D),
            "self_attn.o_proj": (D, query),
            "post_attention_layernorm": (D,),
            "mlp.gate_proj": (inner, D),
            "mlp.up_proj": (inner, D),
            "mlp.down_proj": (D, inner),
        }
        if self.head_norms:
            layer |= {"self_attn.q_norm": (K,), "self_attn.k_norm": (K,)}
        if layers > self.num_hidden_layers:
            raise ValueError(
                f"the hidden state must be <= {self.num_hidden_layers}, the text encoder's number of layers, got {layers}"
            )
        named = {f"layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in layer.items()}
        final = {"norm.weight": (D,)} if layers == self.num_hidden_layers else {}
        return {"embed_tokens.weight": (self.vocab_size, D), **named, **final}

    @classmethod
    def weight_name(cls, key: str) -> str | None:
        """`layers.0.mlp.up_proj.weight` for "model.layers.0.mlp.up_proj.weight"; None for a weight of the vision part. The
        output head keeps "lm_head.", and a name without known prefix stays.
        """
        if key.startswith(VISION):
            return None
        if head := next((prefix for prefix in HEADS if key.startswith(prefix)), ""):
            return "lm_head." + key[len(head) :]
        return next((key[len(prefix) :] for prefix in DECODER if key.startswith(prefix)), key)


def unneeded_beyond(layers: int, total: int) -> Callable[[str], bool]:
    """Whether the first `layers` of `total` layers do not need a weight: of later layers, the output head, the final norm."""

    def unneeded(key: str) -> bool:
        if key in ("norm.weight", "lm_head.weight"):
            return key != "norm.weight" or layers < total
        head, _, rest = key.partition("layers.")
        number = rest.partition(".")[0]
        return head == "" and number.isdecimal() and int(number) >= layers

    return unneeded


def mask(real_BT: mx.array) -> mx.array:
    """Boolean (B, 1, T, T): token i attends to the real tokens j <= i. Padding at the start attends to nothing."""
    T = real_BT.shape[1]
    place_T = mx.arange(T)
    causal_TT = place_T[:, None] >= place_T[None, :]
    return causal_TT[None, None] & real_BT[:, None, None, :]


class Decoder:
    """`weights`: arrays, or quantised weights with `dense()`; the token embedding and the norms must be arrays."""

    def __init__(self, config: DecoderConfig, weights: Mapping[str, Any]) -> None:
        self.config = config
        self.weights = weights

    def encode(self, tokens_BT: mx.array, real_BT: mx.array, layers: Sequence[int]) -> mx.array:
        """Hidden states `layers`, joined: (B, T, len(layers) D). State 0 is the token embedding."""
        h_BTD = self.weights["embed_tokens.weight"][tokens_BT]
        seen_B1TT = mask(real_BT)
        states, running = {0: h_BTD}, deque[mx.array]()
        for i in range(max(layers)):
            h_BTD = self.layer(i, h_BTD, seen_B1TT)
            kernels.dispatch(h_BTD)
            running.append(h_BTD)
            if len(running) > IN_FLIGHT:
                mx.eval(running.popleft())  # else the unpacked weights of all layers would exist at once
            # On CUDA a thread of MLX frees what is computed, and falls behind: 4.2 GB instead of 3.3 were seen at 4 bits.
            if mx.get_active_memory() > mx.get_memory_limit():
                mx.synchronize()
            states[i + 1] = self.state(i + 1, h_BTD)
        return mx.concatenate([states[k] for k in layers], axis=-1)

    def state(self, k: int, h_BTD: mx.array) -> mx.array:
        """Hidden state `k` from the output of `layer(k - 1)`: the model's last one is normalised."""
        return h_BTD if k < self.config.num_hidden_layers else self._norm("norm", h_BTD)

    def layer(self, i: int, h_BTD: mx.array, seen_B1TT: mx.array) -> mx.array:
        h_BTD = h_BTD + self._attend(f"layers.{i}.self_attn", self._norm(f"layers.{i}.input_layernorm", h_BTD), seen_B1TT)
        return h_BTD + self._feed_forward(f"layers.{i}.mlp", self._norm(f"layers.{i}.post_attention_layernorm", h_BTD))

    def _attend(self, name: str, x_BTD: mx.array, seen_B1TT: mx.array) -> mx.array:
        c = self.config
        real_B1T1 = mx.diagonal(seen_B1TT, axis1=-2, axis2=-1)[..., None]
        q_BHTK = self._heads(f"{name}.q", x_BTD, c.num_attention_heads, real_B1T1)
        k_BGTK = self._heads(f"{name}.k", x_BTD, c.num_key_value_heads, real_B1T1)
        v_BTGK = self._linear(f"{name}.v_proj", x_BTD).reshape(*x_BTD.shape[:2], c.num_key_value_heads, c.head_dim)
        out_BHTK = attention(q_BHTK, k_BGTK, v_BTGK.transpose(0, 2, 1, 3), c.head_dim**-0.5, seen_B1TT)
        out_BHTK = mx.where(seen_B1TT.any(-1, keepdims=True), out_BHTK, 0)  # padding at the start attends to nothing
        return self._linear(f"{name}.o_proj", out_BHTK.transpose(0, 2, 1, 3).reshape(*x_BTD.shape[:2], -1))

    def _heads(self, name: str, x_BTD: mx.array, heads: int, real_B1T1: mx.array) -> mx.array:
        c = self.config
        x_BTHK = self._linear(f"{name}_proj", x_BTD).reshape(*x_BTD.shape[:2], heads, c.head_dim)
        x_BHTK = (self._norm(f"{name}_norm", x_BTHK) if c.head_norms else x_BTHK).transpose(0, 2, 1, 3)
        rope = functools.partial(mx.fast.rope, dims=c.head_dim, traditional=False, base=c.rope_theta, scale=1.0)
        turned_BHTK = rope(x_BHTK, offset=0)
        if c.padding_at is None:
            return turned_BHTK
        B, _, T, K = x_BHTK.shape
        alone = rope(x_BHTK.reshape(B, heads * T, 1, K), offset=c.padding_at)  # as sequences of one row
        return mx.where(real_B1T1, turned_BHTK, alone.reshape(B, heads, T, K))

    def _feed_forward(self, name: str, x_BTD: mx.array) -> mx.array:
        gate = self._linear(f"{name}.gate_proj", x_BTD)
        return self._linear(f"{name}.down_proj", silu(gate) * self._linear(f"{name}.up_proj", x_BTD))

    def _norm(self, name: str, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    def _linear(self, name: str, x: mx.array) -> mx.array:
        return kernels.linear(x, self.weights[f"{name}.weight"])


@dataclass(frozen=True)
class Qwen3Config(DecoderConfig):
    title = "Qwen3"
    kinds = ("qwen3",)
    vision = False
    head_norms = True
    supported = {"attention_bias": False, "hidden_act": "silu", "use_sliding_window": False}  # noqa: RUF012  (never changed)

    @classmethod
    def weight_name(cls, key: str) -> str:
        return key.removeprefix("model.")


@dataclass(frozen=True)
class Qwen3VLConfig(DecoderConfig):
    """The text part: Qwen3 in all but the padding, as a text alone has one position for time, height and width."""

    title = "Qwen3-VL"
    kinds = ("qwen3_vl", "qwen3_vl_text")
    vision = True
    head_norms = True
    # Position of padding in transformers 4.57, with which FLUX 3, which reads padding, was trained. Later versions count on.
    padding_at = 1
    supported = {"attention_bias": False, "hidden_act": "silu"}  # noqa: RUF012  (never changed)


# What the names of the decoder's weights begin with: in released files, as transformers names them, and in files of the text
# part alone. The first that fits counts.
DECODER = ("language_model.model.", "model.language_model.", "model.")
VISION = tuple(f"{model}{part}." for model in ("", "model.") for part in ("vision_tower", "multi_modal_projector", "visual"))
HEADS = ("language_model.lm_head.", "model.lm_head.")


@dataclass(frozen=True)
class Mistral3Config(DecoderConfig):
    title = "Mistral Small 3"
    head_norms = False
    supported = {"attention_bias": False, "hidden_act": "silu", "sliding_window": None}  # noqa: RUF012  (never changed)


OUTSIDE = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
INSIDE = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
UNUSED = ("rope_freqs.weight",)  # constants of the rotary embedding
INTERLEAVED = ("self_attn.q_proj", "self_attn.k_proj")


def from_gguf(arrays: Mapping[str, mx.array], head_dim: int, interleaved: bool, path: Path) -> dict[str, mx.array]:
    """`interleaved`: the model is of Llama's architecture, such as Mistral. Raises ValueError if a name is not known."""
    done: dict[str, mx.array] = {}
    for key, value in arrays.items():
        if key in UNUSED:
            continue
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", key)
        inside = INSIDE.get(layer[2]) if layer else OUTSIDE.get(key.removesuffix(".weight"))
        if inside is None:
            raise ValueError(f"{path} holds {key}, which the text encoder does not have")
        if interleaved and inside in INTERLEAVED:
            # Transformers has the even rows of each head first, then the odd ones.
            heads = value.shape[0] // head_dim
            value = value.reshape(heads, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(value.shape)
        done[f"layers.{layer[1]}.{inside}.weight" if layer else f"{inside}.weight"] = value
    return done
