"""The Z-Image transformer as a chain of blocks, as `family.Transformer` describes it.

The text rows and the image rows are padded with a learnt token to multiples of 32, which attention reads like any row. The first
blocks see the image alone (noise_refiner) or the text alone (context_refiner), the others both as one array, text first.
Sources: src/zimage/transformer.py of Tongyi-MAI/Z-Image; diffusers' ZImageTransformer2DModel, whose names of weights these are.
B batch, T text rows, L image rows, S rows of the stream, C latent channels, J text features, D hidden width, E time features,
H heads, K head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from stages import kernels
from stages.models import layers
from stages.models.attention import plain_linear, rms_norm, silu
from stages.models.family import Linear
from stages.models.folders import checked_sizes
from stages.models.layers import attend, rotate, silu_times, sinusoid, split_heads, spread
from stages.models.transformer import PictureTransformer, Shapes, Shared, Streams, joined
from stages.own_gradient import OwnGradient

MULTIPLE = 32  # of the rows of each stream
SHIFT = 3.0  # of the noise levels of drawing, towards 1
PATCH = 2  # positions of the latent along one side of a token
EPS = 1e-5  # of every norm but the one after the last block, in every released Z-Image
TIME = 256  # features of the sinusoid, and the most of the time embedding
TIME_HIDDEN = 1024
TRANSFORMER_CLASS = "ZImageTransformer2DModel"  # the class in diffusers
OUTSIDE_BITS = 16  # all weights outside the blocks are 24 MB
KINDS = ("noise_refiner", "context_refiner", "layers")  # of blocks, in the order of the forward pass; names begin with them
LATENT, LAST = "all_x_embedder.2-1", "all_final_layer.2-1"  # 2-1: patches of 2 x 2 positions of one frame


@dataclass(frozen=True)
class ZImageConfig:
    """Fields have the names and meanings of the keys in config.json."""

    in_channels: int
    dim: int
    n_layers: int
    n_refiner_layers: int
    n_heads: int
    n_kv_heads: int
    cap_feat_dim: int
    norm_eps: float
    rope_theta: float
    t_scale: float
    axes_dims: tuple[int, ...]
    axes_lens: tuple[int, ...]
    qk_norm: bool = True
    all_patch_size: tuple[int, ...] = (PATCH,)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ZImageConfig:
        """Raises ValueError if a key is missing or a value is not supported. Unknown keys are ignored."""
        made = cls(**checked_sizes(cls, config, "the transformer's config", "Z-Image"))
        if made.dim % made.n_heads or sum(made.axes_dims) != made.attention_head_dim or any(d % 2 for d in made.axes_dims):
            raise ValueError(
                f"axes_dims must be even and add up to dim / n_heads, got {made.axes_dims}, {made.dim} and {made.n_heads}"
            )
        if len(made.axes_dims) != 3 or len(made.axes_lens) != 3:
            raise ValueError(f"axes_dims and axes_lens must have 3 numbers each, got {made.axes_dims} and {made.axes_lens}")
        if made.norm_eps != EPS:
            raise ValueError(f"the transformer's norm_eps must be {EPS}, got {made.norm_eps}")
        if made.n_kv_heads != made.n_heads or not made.qk_norm or made.all_patch_size != (PATCH,):
            raise ValueError(
                f"the transformer's config must have n_kv_heads = n_heads, qk_norm = true and all_patch_size = [{PATCH}], got "
                f"{made.n_kv_heads} and {made.n_heads}, {made.qk_norm} and {list(made.all_patch_size)}"
            )
        return made

    @property
    def axes(self) -> tuple[int, ...]:
        return self.axes_dims

    @property
    def num_attention_heads(self) -> int:
        return self.n_heads

    @property
    def attention_head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def latent_channels(self) -> int:
        return PATCH * PATCH * self.in_channels

    @property
    def text_features(self) -> int:
        return self.cap_feat_dim

    @property
    def time_features(self) -> int:
        return min(self.dim, TIME)

    def blocks(self) -> list[tuple[str, str]]:
        """(kind, name) in the order of the forward pass."""
        counts = dict.fromkeys(KINDS, self.n_refiner_layers) | {"layers": self.n_layers}
        return [(kind, f"{kind}.{i}") for kind in KINDS for i in range(counts[kind])]

    def shapes(self) -> Shapes:
        """By diffusers' name."""
        D, E, K, F = self.dim, self.time_features, self.attention_head_dim, int(self.dim / 3 * 8)
        found: Shapes = _biased(LATENT, D, self.latent_channels)
        found |= _biased("t_embedder.mlp.0", TIME_HIDDEN, TIME) | _biased("t_embedder.mlp.2", E, TIME_HIDDEN)
        found |= {"cap_embedder.0.weight": (self.cap_feat_dim,)} | _biased("cap_embedder.1", D, self.cap_feat_dim)
        found |= {"x_pad_token": (1, D), "cap_pad_token": (1, D)}
        block: Shapes = {f"attention.{n}.weight": (D, D) for n in ("to_q", "to_k", "to_v", "to_out.0")}
        block |= {f"attention.{n}.weight": (K,) for n in ("norm_q", "norm_k")}
        block |= {f"feed_forward.{n}.weight": (F, D) for n in ("w1", "w3")} | {"feed_forward.w2.weight": (D, F)}
        block |= {f"{n}.weight": (D,) for n in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")}
        modulated = block | _biased("adaLN_modulation.0", 4 * D, E)
        for kind, name in self.blocks():
            found |= {f"{name}.{n}": s for n, s in (block if kind == "context_refiner" else modulated).items()}
        return found | _biased(f"{LAST}.adaLN_modulation.1", D, E) | _biased(f"{LAST}.linear", self.latent_channels, D)


def _biased(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def in_block(name: str) -> bool:
    return name.startswith(tuple(f"{kind}." for kind in KINDS))


def packs_outside(name: str) -> bool:
    return False


def text_rows(tokens: int) -> int:
    return -(-tokens // MULTIPLE) * MULTIPLE


def inputs(
    x_BLC: mx.array,
    size: tuple[int, int],
    text_BTJ: mx.array,
    sigma_B: mx.array,
    guidance: float | None = None,
    references: Sequence[mx.array] = (),
    tokens_B: mx.array | None = None,
    target_B: mx.array | None = None,
) -> dict[str, Any]:
    """Keyword arguments of `ZImage.enter`; see `Architecture.inputs`. `guidance` and `target_B` are not read."""
    if references:
        raise ValueError("Z-Image reads no reference images: take them away, or choose another family")
    return {"x_BLC": x_BLC, "size": size, "ctx_BTJ": text_BTJ, "sigma_B": sigma_B, "tokens_B": tokens_B}


def joint_block(weights: dict[str, Any], h: Streams, shared: Shared, linear: Linear = plain_linear) -> mx.array:
    """`shared` is what `ZImage.enter` returned; in all blocks."""
    return _block(weights, joined(h), shared["rope"], linear, shared["time"][0])


def image_block(weights: dict[str, Any], h: tuple[mx.array, ...], shared: Shared, linear: Linear = plain_linear) -> Streams:
    h_BTD, h_BLD = h
    return h_BTD, _block(weights, h_BLD, shared["image_rope"], linear, shared["time"][0])


def text_block(weights: dict[str, Any], h: tuple[mx.array, ...], shared: Shared, linear: Linear = plain_linear) -> Streams:
    h_BTD, h_BLD = h
    return _block(weights, h_BTD, shared["text_rope"], linear), h_BLD


def _block(
    weights: dict[str, Any], x_BSD: mx.array, rope: list[mx.array], linear: Linear, time_BE: mx.array | None = None
) -> mx.array:
    """Attention, then feed-forward, each normalised before and after. Without `time_BE` nothing is scaled or gated."""

    def apply(name: str, x: mx.array) -> mx.array:
        return linear(name, weights[f"{name}.weight"], x)

    def norm(name: str, x: mx.array, factor: mx.array | None = None) -> mx.array:
        weight = weights[f"{name}.weight"]
        return rms_norm(x, weight, EPS) if factor is None else modulated_norm(x, weight, factor)

    def heads(name: str) -> mx.array:
        return split_heads(apply(f"attention.{name}", y_BSD), weights["attention.norm_q.weight"].shape[0])

    scale_a = gate_a = scale_f = gate_f = None
    if time_BE is not None:
        m_B1M = (apply("adaLN_modulation.0", time_BE) + weights["adaLN_modulation.0.bias"])[:, None]
        parts = mx.split(m_B1M, 4, axis=-1)
        scale_a, gate_a, scale_f, gate_f = 1 + parts[0], mx.tanh(parts[1]), 1 + parts[2], mx.tanh(parts[3])
    y_BSD = norm("attention_norm1", x_BSD, scale_a)
    q_BSHK, k_BSHK = (rotate(norm(f"attention.norm_{n}", heads(f"to_{n}")), *rope) for n in ("q", "k"))
    y_BSD = apply("attention.to_out.0", attend(q_BSHK, k_BSHK, heads("to_v")))
    x_BSD = x_BSD + norm("attention_norm2", y_BSD, gate_a)
    y_BSD = norm("ffn_norm1", x_BSD, scale_f)
    y_BSD = apply("feed_forward.w2", silu_times(apply("feed_forward.w1", y_BSD), apply("feed_forward.w3", y_BSD)))
    return x_BSD + norm("ffn_norm2", y_BSD, gate_f)


def modulated_norm(x_BSD: mx.array, weight_D: mx.array, factor_B1D: mx.array) -> mx.array:
    """RMSNorm with a frozen weight, times `factor_B1D`."""
    # On a GPU, the factors of a single sample are part of the weight: one kernel. On a CPU, MLX has no kernel of the norm.
    if x_BSD.shape[0] == 1 and kernels.compiles():
        return _weighted_norm(x_BSD, weight_D, factor_B1D)
    return rms_norm(x_BSD, weight_D, EPS) * factor_B1D


@OwnGradient
def _weighted_norm(x_1SD: mx.array, weight_D: mx.array, factor_11D: mx.array) -> mx.array:
    return mx.fast.rms_norm(x_1SD, weight_D * factor_11D[0, 0], EPS)


@_weighted_norm.vjp
def _weighted_norm_vjp(primals: Any, dy_1SD: mx.array, _: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    x_1SD, weight_D, factor_11D = primals
    dx = mx.vjp(lambda x: mx.fast.rms_norm(x, None, EPS), [x_1SD], [dy_1SD * (weight_D * factor_11D)])[1][0]
    # Never computed unless the modulation is trained.
    dfactor = (dy_1SD.astype(mx.float32) * mx.fast.rms_norm(x_1SD, weight_D, EPS)).sum(axis=1, keepdims=True)
    return dx, mx.zeros_like(weight_D), dfactor.astype(factor_11D.dtype)


class ZImage(PictureTransformer):
    """Predicts the velocity, noise minus clean latent. See `family.Transformer`."""

    kinds = dict(zip(KINDS, (image_block, text_block, joint_block), strict=True))  # noqa: RUF012  (never changed)
    latent = LATENT

    def enter(
        self, x_BLC: mx.array, size: tuple[int, int], ctx_BTJ: mx.array, sigma_B: mx.array, tokens_B: mx.array | None = None
    ) -> tuple[Streams, Shared]:
        """(h, what blocks read). `size`: height and width of the image in tokens; `sigma_B`: noise levels, 0 (clean) to 1;
        `tokens_B`: rows of each text that are not there to level the batch, of one multiple of 32; None: all.
        """
        L, T = x_BLC.shape[1], text_rows(ctx_BTJ.shape[1])
        h_BLD = self._padded(self._linear(LATENT, x_BLC.astype(self.dtype)), "x_pad_token")
        text_BTJ = rms_norm(ctx_BTJ.astype(self.dtype), self.top["cap_embedder.0.weight"], EPS)
        h_BTD = self._linear("cap_embedder.1", text_BTJ)
        if tokens_B is not None:
            real_BT = mx.arange(h_BTD.shape[1]) < tokens_B[:, None]
            h_BTD = mx.where(real_BT[..., None], h_BTD, self.top["cap_pad_token"])
        h_BTD = self._padded(h_BTD, "cap_pad_token")
        time_BE = self._time(1 - sigma_B.astype(mx.float32))
        scale_BD = 1 + self._linear(f"{LAST}.adaLN_modulation.1", silu(time_BE))
        ids_T3, ids_L3 = _ids(T, size, h_BLD.shape[1])
        ropes = {"text_rope": ids_T3, "image_rope": ids_L3, "rope": np.concatenate([ids_T3, ids_L3])}
        shared: Shared = {name: self.rope(ids) for name, ids in ropes.items()}
        return (h_BTD, h_BLD), shared | {"time": [time_BE], "out": spread([scale_BD], L)}

    def leave(self, h_BSD: mx.array, shared: Shared) -> mx.array:
        """Velocity (B, L, C) of the image tokens."""
        scale_BLD: mx.array = shared["out"][0]
        T, L = shared["text_rope"][0].shape[0], scale_BLD.shape[1]
        h_BLD = mx.fast.layer_norm(h_BSD[:, T : T + L], None, None, layers.EPS) * scale_BLD
        return -self._linear(f"{LAST}.linear", h_BLD)  # the model itself predicts clean minus noise

    def _time(self, clean_B: mx.array) -> mx.array:
        x = sinusoid(self.config.t_scale * clean_B, TIME).astype(self.dtype)
        return self._linear("t_embedder.mlp.2", silu(self._linear("t_embedder.mlp.0", x)))

    def _padded(self, h_BSD: mx.array, token: str) -> mx.array:
        B, S, D = h_BSD.shape
        more = text_rows(S) - S
        return mx.concatenate([h_BSD, mx.broadcast_to(self.top[token], (B, more, D))], axis=1) if more else h_BSD


def _ids(text: int, size: tuple[int, int], image: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions (rows, 3) of the text and of the image, padding included: the image comes after the text on the first axis."""
    ids_T3 = np.zeros((text, 3), np.int64)
    ids_T3[:, 0] = 1 + np.arange(text)
    row, col = np.indices(size).reshape(2, -1)
    ids_L3 = np.zeros((image, 3), np.int64)  # padding is at 0, 0, 0
    ids_L3[: row.size] = np.stack([0 * row + text + 1, row, col], axis=-1)
    return ids_T3, ids_L3
