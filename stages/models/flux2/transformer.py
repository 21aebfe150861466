"""The FLUX.2 transformer, as functions over a chain of blocks: a caller can walk it, trade its Linears, or just call it.

Names of tensors are those of the diffusers layout. The residual stream is one array, text rows before image rows, in the
dtype of the weights; nothing in a block widens it.

B batch, T text rows, L image rows, S = T + L, C latent channels, J text features, D hidden, F feed-forward width,
H heads, K head width, P = K / 2 rotary pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models.attention import attention

Shared = dict[str, Any]  # what all blocks are given: modulation, rotary tables, text ids; arrays and lists of them
Linear = Callable[[str, Any, mx.array], mx.array]  # (name within the block, weight, x) -> y: where a LoRA comes in

EPS = 1e-6  # of every norm: no released FLUX.2 has another
MODULATIONS = {
    "text": "double_stream_modulation_txt",
    "image": "double_stream_modulation_img",
    "single": "single_stream_modulation",
}
OUTSIDE_BITS = 8  # the fewest bits of a Linear outside the blocks
TRANSFORMER_CLASS = "Flux2Transformer2DModel"  # its class in diffusers
TABLES_KEPT = 32  # rotary tables: one per image shape, 2.4 MB at 1024 px


@dataclass(frozen=True)
class Flux2Config:
    """The transformer's sizes, with the names of its config.json."""

    in_channels: int
    num_layers: int
    num_single_layers: int
    attention_head_dim: int
    num_attention_heads: int
    joint_attention_dim: int
    timestep_guidance_channels: int
    mlp_ratio: float
    axes_dims_rope: tuple[int, ...]
    rope_theta: float
    eps: float
    guidance_embeds: bool

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Flux2Config:
        """The sizes in a config.json; other keys are not ours. ValueError for a missing or an impossible field."""
        missing = [f.name for f in fields(cls) if f.name not in config]
        if missing:
            raise ValueError(f"the transformer's config lacks {', '.join(missing)}; is this a FLUX.2 transformer?")
        made = cls(**{f.name: config[f.name] for f in fields(cls)} | {"axes_dims_rope": tuple(config["axes_dims_rope"])})
        if sum(made.axes_dims_rope) != made.attention_head_dim:
            raise ValueError(f"axes_dims_rope {made.axes_dims_rope} must add up to attention_head_dim {made.attention_head_dim}")
        if made.eps != EPS:
            raise ValueError(f"the transformer's eps is {made.eps}; only {EPS} is known")
        return made

    @property
    def hidden(self) -> int:
        """D."""
        return self.num_attention_heads * self.attention_head_dim

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's name and shape, complete: what the weights must hold."""
        D, K, F, C = self.hidden, self.attention_head_dim, int(self.hidden * self.mlp_ratio), self.in_channels
        found: dict[str, tuple[int, ...]] = {"x_embedder": (D, C), "context_embedder": (D, self.joint_attention_dim)}
        for kind in ("timestep", "guidance") if self.guidance_embeds else ("timestep",):
            found[f"time_guidance_embed.{kind}_embedder.linear_1"] = (D, self.timestep_guidance_channels)
            found[f"time_guidance_embed.{kind}_embedder.linear_2"] = (D, D)
        for stream, name in MODULATIONS.items():
            found[f"{name}.linear"] = (3 * D if stream == "single" else 6 * D, D)
        double = {
            f"attn.{n}": (D, D)
            for n in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out")
        }
        norms = {f"attn.{n}": (K,) for n in ("norm_q", "norm_k", "norm_added_q", "norm_added_k")}
        mlps = {f"{m}.{n}": s for m in ("ff", "ff_context") for n, s in (("linear_in", (2 * F, D)), ("linear_out", (D, F)))}
        single = {"attn.to_qkv_mlp_proj": (3 * D + 2 * F, D), "attn.to_out": (D, D + F), "attn.norm_q": (K,), "attn.norm_k": (K,)}
        for i in range(self.num_layers):
            found |= {f"transformer_blocks.{i}.{n}": s for n, s in {**double, **norms, **mlps}.items()}
        for i in range(self.num_single_layers):
            found |= {f"single_transformer_blocks.{i}.{n}": s for n, s in single.items()}
        found |= {"norm_out.linear": (2 * D, D), "proj_out": (C, D)}
        return {f"{name}.weight": shape for name, shape in found.items()}


@dataclass(frozen=True)
class Block:
    """One link of the chain. The weights' names are relative to the block: "attn.to_q.weight"."""

    kind: str  # double or single
    name: str  # transformer_blocks.0
    weights: dict[str, Any]


def image_ids(height: int, width: int) -> np.ndarray:
    """Places of the image tokens of a latent of `height` x `width`, row by row: (L,4), (0, row, column, 0)."""
    row, col = np.indices((height, width)).reshape(2, -1)
    return np.stack([0 * row, row, col, 0 * row], axis=-1)


def text_ids(count: int) -> np.ndarray:
    """Places of `count` text rows, padding included: (T,4), (0, 0, 0, k)."""
    ids_T4 = np.zeros((count, 4), np.int64)
    ids_T4[:, 3] = np.arange(count)
    return ids_T4


def packs_outside(name: str) -> bool:
    """Whether a Linear outside the blocks is worth packing: dev has 1.6 GB of them, all but a few MB in these.

    They steer every block, so they are packed to no less than OUTSIDE_BITS.
    """
    return name.startswith(("context_embedder", "time_guidance_embed", "norm_out", *MODULATIONS.values()))


def plain_linear(name: str, weight: Any, x: mx.array) -> mx.array:
    """A Linear as it stands: an array, or a packed weight, which says what it stands for by `dense()`."""
    y: mx.array = x @ (weight if isinstance(weight, mx.array) else weight.dense()).T
    return y


class Flux2:
    """The transformer. `model(...)` is the velocity; `enter`, the blocks in order, `leave` is the same in steps."""

    def __init__(self, config: Flux2Config, weights: Mapping[str, Any]) -> None:
        """`weights` has the names of `config.shapes()`; those of the blocks may be anything that the caller's Linear takes.

        Outside the blocks a weight is an array, or has `dense()`; that of x_embedder is an array.
        """
        self.config = config
        self.top: dict[str, Any] = {}
        doubles = [Block("double", f"transformer_blocks.{i}", {}) for i in range(config.num_layers)]
        singles = [Block("single", f"single_transformer_blocks.{i}", {}) for i in range(config.num_single_layers)]
        self.blocks = doubles + singles
        inside = {block.name: block for block in self.blocks}
        for name in config.shapes():
            head, number, rest = [*name.split(".", 2), "", ""][:3]
            if block := inside.get(f"{head}.{number}"):
                block.weights[rest] = weights[name]
            else:
                self.top[name] = weights[name]
        self._tables: dict[bytes, list[mx.array]] = {}

    @property
    def dtype(self) -> mx.Dtype:
        """What it computes in."""
        found: mx.Dtype = self.top["x_embedder.weight"].dtype
        return found

    def linears(self) -> dict[str, tuple[int, int]]:
        """Every Linear of every block by its full name, "transformer_blocks.0.attn.to_out.0": (outputs, inputs)."""
        inside = {n.removesuffix(".weight"): s for n, s in self.config.shapes().items() if "transformer_blocks." in n}
        return {name: (shape[0], shape[1]) for name, shape in inside.items() if len(shape) == 2}

    @staticmethod
    def block(kind: str) -> Callable[..., mx.array]:
        """The function of a kind of block: (weights, h_BSD, shared, linear=plain_linear) -> h_BSD."""
        return {"double": double_block, "single": single_block}[kind]

    def enter(
        self,
        x_BLC: mx.array,
        x_ids_L4: np.ndarray,
        ctx_BTJ: mx.array,
        ctx_ids_T4: np.ndarray,
        timesteps_B: mx.array,
        guidance_B: mx.array | None = None,
    ) -> tuple[mx.array, Shared]:
        """The stream before the first block, and what all blocks share. `timesteps` is sigma, 0 (clean) to 1 (noise).

        `guidance` (4.0, say) is for a model with a guidance embedding, which needs it; others ignore it.
        """
        temb_BD = self._embed("timestep", timesteps_B)
        if self.config.guidance_embeds:
            if guidance_B is None:
                raise ValueError("this transformer has a guidance embedding: it needs a guidance value, one per image")
            temb_BD = temb_BD + self._embed("guidance", guidance_B)
        temb_BD = silu(temb_BD)
        T, L = ctx_BTJ.shape[1], x_BLC.shape[1]
        shared: Shared = {}
        for (stream, name), rows in zip(MODULATIONS.items(), (T, L, T + L), strict=True):
            shared[stream] = modulation(self._linear(f"{name}.linear", temb_BD), self.config.hidden, rows)
        scale_BD, shift_BD = mx.split(self._linear("norm_out.linear", temb_BD), 2, axis=-1)
        shared["out"] = spread([shift_BD, 1 + scale_BD], L)
        shared["rope"] = self._rope(np.concatenate([ctx_ids_T4, x_ids_L4]))
        shared["ctx_ids"] = mx.array(np.asarray(ctx_ids_T4, np.int32))
        h_BTD = self._linear("context_embedder", ctx_BTJ.astype(self.dtype))
        h_BLD = self._linear("x_embedder", x_BLC.astype(self.dtype))
        return mx.concatenate([h_BTD, h_BLD], axis=1), shared

    def leave(self, h_BSD: mx.array, shared: Shared) -> mx.array:
        """The velocity (noise - clean) of the image tokens, (B,L,C), from the stream after the last block."""
        h_BLD = modulate(h_BSD[:, text_rows(shared) :], shared["out"])
        return self._linear("proj_out", h_BLD)

    def __call__(
        self,
        x_BLC: mx.array,
        x_ids_L4: np.ndarray,
        ctx_BTJ: mx.array,
        ctx_ids_T4: np.ndarray,
        timesteps_B: mx.array,
        guidance_B: mx.array | None = None,
        linear_for: Callable[[str], Linear] | None = None,
    ) -> mx.array:
        """The velocity, (B,L,C). `linear_for` gives the Linear of a block by the block's name."""
        h_BSD, shared = self.enter(x_BLC, x_ids_L4, ctx_BTJ, ctx_ids_T4, timesteps_B, guidance_B)
        for block in self.blocks:
            linear = linear_for(block.name) if linear_for else plain_linear
            h_BSD = self.block(block.kind)(block.weights, h_BSD, shared, linear)
        return self.leave(h_BSD, shared)

    def _embed(self, kind: str, value_B: mx.array) -> mx.array:
        """The embedding of sigma or guidance, (B,D). The sinusoid is float32's: bfloat16 would round 937 to 936.

        The exponents are rounded to float32 as the reference does, since a last bit of a frequency is a thousand in the angle.
        """
        half = self.config.timestep_guidance_channels // 2
        exponents = np.float32(-math.log(10000)) * np.arange(half, dtype=np.float32) / np.float32(half)
        freqs = mx.array(np.exp(exponents.astype(np.float64)), mx.float32)
        angles = 1000 * value_B.astype(mx.float32)[:, None] * freqs
        x = mx.concatenate([mx.cos(angles), mx.sin(angles)], axis=-1).astype(self.dtype)
        first, second = (f"time_guidance_embed.{kind}_embedder.linear_{i}" for i in (1, 2))
        return self._linear(second, silu(self._linear(first, x)))

    def _linear(self, name: str, x: mx.array) -> mx.array:
        """A Linear outside the blocks."""
        return plain_linear(name, self.top[f"{name}.weight"], x)

    def _rope(self, ids_S4: np.ndarray) -> list[mx.array]:
        """Cosines and sines of all rows, (S,1,K) each, every value twice: float32 of float64 angles, kept for that shape."""
        key = np.asarray(ids_S4, np.int64).tobytes()
        if key not in self._tables:
            axes = self.config.axes_dims_rope
            freqs = [self.config.rope_theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim) for dim in axes]
            angles_SP = np.concatenate([ids_S4[:, i, None] * f for i, f in enumerate(freqs)], axis=-1)
            pair = (turn(angles_SP).repeat(2, axis=-1)[:, None] for turn in (np.cos, np.sin))
            self._tables[key] = [mx.array(each, mx.float32) for each in pair]
            if len(self._tables) > TABLES_KEPT:
                self._tables.pop(next(iter(self._tables)))
        return self._tables[key]


def meta_transformer(config: Flux2Config, dtype: mx.Dtype) -> Flux2:
    """Build a transformer of arrays that are never computed: it has every name and shape and takes no memory."""
    return Flux2(config, {name: mx.zeros(shape, dtype) for name, shape in config.shapes().items()})


def text_rows(shared: Shared) -> int:
    """T: how many rows at the head of the stream are text. A shape, so that a compiled block knows it too."""
    rows: int = shared["ctx_ids"].shape[0]
    return rows


def silu(x: mx.array) -> mx.array:
    """x times its sigmoid."""
    return x * mx.sigmoid(x)


def modulation(y_BN: mx.array, hidden: int, rows: int) -> list[mx.array]:
    """Shift, 1 + scale and gate, once or twice over, (B,S,D) each: the one is added here, once for all blocks."""
    parts = mx.split(y_BN, y_BN.shape[-1] // hidden, axis=-1)
    return spread([1 + part if at % 3 == 1 else part for at, part in enumerate(parts)], rows)


def spread(parts: Sequence[mx.array], rows: int) -> list[mx.array]:
    """Each (B,D) as the same for every one of S rows: views, (B,S,D).

    Done once for all blocks: within a compiled one it would be a step of a kernel, and each kind of those costs a GPU seconds.
    """
    return [mx.broadcast_to(part_BD[:, None], (part_BD.shape[0], rows, part_BD.shape[1])) for part_BD in parts]


def modulate(x_BSD: mx.array, mods: list[mx.array]) -> mx.array:
    """LayerNorm, then shift and scale: `mods` starts with the shift and 1 + scale.

    The blocks add what they gate in this order of factors and terms, so that one compiled kernel serves for both.
    """
    return mx.fast.layer_norm(x_BSD, None, None, EPS) * mods[1] + mods[0]


def swiglu(x_BSF: mx.array) -> mx.array:
    """The first half of the features gates the second."""
    gate, up = mx.split(x_BSF, 2, axis=-1)
    return gated(gate, up)


def gated(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) up. For the gradient the sigmoid is computed again: it is cheaper than to keep it."""
    made: Any = _gated(gate, up)
    y: mx.array = made
    return y


@mx.custom_function
def _gated(gate: mx.array, up: mx.array) -> mx.array:
    return silu(gate) * up


@_gated.vjp  # type: ignore[untyped-decorator, unused-ignore]
def _gated_vjp(primals: Any, dy: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    # Made to follow dy, and one another: the compiler would else see the forward pass's sigmoid again, and keep it until here.
    gate, up = mx.depends(list(primals), [dy])
    share = mx.sigmoid(gate)
    dgate = dy * up * (share + gate * share * (1 - share))
    again = mx.depends([gate], [dgate])[0]
    return dgate, silu(again) * dy


def normed(x_BSHK: mx.array, weight_K: mx.array) -> mx.array:
    """RMS norm of every head. Its weight is frozen, and gets no gradient: MLX's own would sum one up over all rows."""
    made: Any = _normed(x_BSHK, weight_K)
    y_BSHK: mx.array = made
    return y_BSHK


@mx.custom_function
def _normed(x_BSHK: mx.array, weight_K: mx.array) -> mx.array:
    return mx.fast.rms_norm(x_BSHK, weight_K, EPS)


@_normed.vjp  # type: ignore[untyped-decorator, unused-ignore]
def _normed_vjp(primals: Any, dy_BSHK: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    x_BSHK, weight_K = primals
    back = mx.vjp(lambda x: mx.fast.rms_norm(x, None, EPS), [x_BSHK], [dy_BSHK * weight_K])[1]
    return back[0], mx.zeros_like(weight_K)


def rotate(x_BSHK: mx.array, rope: Sequence[mx.array]) -> mx.array:
    """Turn each pair of neighbouring features by its row's angles, in float32, and back to the dtype of x.

    (x0, x1) becomes cos (x0, x1) + sin (-x1, x0). The gradient is turned back.
    """
    made: Any = _rotated(x_BSHK, *rope)
    y_BSHK: mx.array = made
    return y_BSHK


@mx.custom_function
def _rotated(x_BSHK: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    return _turned(x_BSHK, cos, sin, [[0, 1], [-1, 0]])


@_rotated.vjp  # type: ignore[untyped-decorator, unused-ignore]
def _rotated_vjp(primals: Any, dy_BSHK: mx.array, _: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    # As both features of a pair have one sine, it may come after the quarter turn back: one pass, that of the forward pass.
    _, cos, sin = primals
    return _turned(dy_BSHK, cos, sin, [[0, -1], [1, 0]]), mx.zeros_like(cos), mx.zeros_like(sin)


def _turned(x_BSHK: mx.array, cos: mx.array, sin: mx.array, quarter: list[list[int]]) -> mx.array:
    """cos x + sin times x by a quarter turn of every pair, a product with a matrix of zeros and ones.

    It is exact, and much faster than taking the pairs apart and putting them together again.
    """
    quarter_KK = mx.array(np.kron(np.eye(x_BSHK.shape[-1] // 2), quarter), x_BSHK.dtype)
    return (x_BSHK * cos + (x_BSHK @ quarter_KK) * sin).astype(x_BSHK.dtype)


def heads(x_BSD: mx.array, width: int) -> mx.array:
    """The features as heads: (B,S,H,K)."""
    return x_BSD.reshape(*x_BSD.shape[:2], -1, width)


def placed(x_BSHK: mx.array, norm_K: mx.array, rope: Sequence[mx.array]) -> mx.array:
    """Queries or keys as attention wants them: normed, and turned to their places."""
    return rotate(normed(x_BSHK, norm_K), rope)


def attend(q_BSHK: mx.array, k_BSHK: mx.array, v_BSHK: mx.array) -> mx.array:
    """Attention of all rows over all rows: (B,S,D)."""
    q_BHSK, k_BHSK, v_BHSK = (x.swapaxes(1, 2) for x in (q_BSHK, k_BSHK, v_BSHK))
    y_BHSK = attention(q_BHSK, k_BHSK, v_BHSK, q_BSHK.shape[-1] ** -0.5)
    return y_BHSK.swapaxes(1, 2).flatten(2)


def double_block(weights: dict[str, Any], h_BSD: mx.array, shared: Shared, linear: Linear = plain_linear) -> mx.array:
    """Text and image have weights of their own and meet in one attention; then a feed-forward each."""

    def apply(name: str, x: mx.array) -> mx.array:
        return linear(name, weights[f"{name}.weight"], x)

    def joint(text_name: str, image_name: str, norms: tuple[str, str] | None = None) -> mx.array:
        parts = []
        for i, (name, x) in enumerate(((text_name, text_in), (image_name, image_in))):
            y_BSHK = heads(apply(name, x), width)
            parts.append(placed(y_BSHK, weights[f"{norms[i]}.weight"], ropes[i]) if norms else y_BSHK)
        return mx.concatenate(parts, axis=1)

    T, width = text_rows(shared), weights["attn.norm_q.weight"].shape[0]
    ropes = list(zip(*(mx.split(turn, [T]) for turn in shared["rope"]), strict=True))  # of the text rows, of the image's
    h_BTD, h_BLD = mx.split(h_BSD, [T], axis=1)
    text, image = shared["text"], shared["image"]
    text_in, image_in = modulate(h_BTD, text), modulate(h_BLD, image)
    q_BSHK = joint("attn.add_q_proj", "attn.to_q", ("attn.norm_added_q", "attn.norm_q"))
    k_BSHK = joint("attn.add_k_proj", "attn.to_k", ("attn.norm_added_k", "attn.norm_k"))
    v_BSHK = joint("attn.add_v_proj", "attn.to_v")
    y_BTD, y_BLD = mx.split(attend(q_BSHK, k_BSHK, v_BSHK), [T], axis=1)
    h_BTD = apply("attn.to_add_out", y_BTD) * text[2] + h_BTD
    h_BLD = apply("attn.to_out.0", y_BLD) * image[2] + h_BLD
    h_BTD = apply("ff_context.linear_out", swiglu(apply("ff_context.linear_in", modulate(h_BTD, text[3:])))) * text[5] + h_BTD
    h_BLD = apply("ff.linear_out", swiglu(apply("ff.linear_in", modulate(h_BLD, image[3:])))) * image[5] + h_BLD
    return mx.concatenate([h_BTD, h_BLD], axis=1)


def single_block(weights: dict[str, Any], h_BSD: mx.array, shared: Shared, linear: Linear = plain_linear) -> mx.array:
    """Text and image as one sequence; attention and feed-forward side by side between two Linears."""
    mods, rope, hidden = shared["single"], shared["rope"], h_BSD.shape[-1]
    q_norm, k_norm = weights["attn.norm_q.weight"], weights["attn.norm_k.weight"]
    name = "attn.to_qkv_mlp_proj"
    x = linear(name, weights[f"{name}.weight"], modulate(h_BSD, mods))
    # In one split: the gradients of all five are put together once.
    q, k, v, gate, up = mx.split(x, [hidden, 2 * hidden, 3 * hidden, (x.shape[-1] + 3 * hidden) // 2], axis=-1)
    q_BSHK, k_BSHK, v_BSHK = (heads(y, q_norm.shape[0]) for y in (q, k, v))
    y_BSD = attend(placed(q_BSHK, q_norm, rope), placed(k_BSHK, k_norm, rope), v_BSHK)
    y_BSF = mx.concatenate([y_BSD, gated(gate, up)], axis=-1)
    name = "attn.to_out"
    gate_BSD: mx.array = mods[2]
    return linear(name, weights[f"{name}.weight"], y_BSF) * gate_BSD + h_BSD
