"""The FLUX.2 transformer as a chain of blocks. A caller can run block after block, replace its Linears, or call all of it.

The double blocks have one array of text rows and one of image rows, the single blocks one of both, text first, in the dtype of
the weights. Names of weights are those of the diffusers layout. Some operations have a gradient of their own, as MLX's keeps more
in memory or takes more kernels.
B batch, T text rows, L image rows, S = T + L rows, C latent channels, J text features, D hidden width, F feed-forward width,
H heads, K head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models.attention import plain_linear, rms_norm, silu
from stages.models.family import Linear
from stages.models.layers import (
    EPS,
    attend,
    modulate,
    modulation,
    rotate,
    silu_times,
    sinusoid,
    split_heads,
    spread,
    swiglu,
    tokens,
)
from stages.models.transformer import FluxConfig, PictureTransformer, Shapes, Shared, Streams, joined

MODULATIONS = {  # stream of rows -> the Linear that gives its shifts, scales and gates
    "text": "double_stream_modulation_txt",
    "image": "double_stream_modulation_img",
    "single": "single_stream_modulation",
}
TRANSFORMER_CLASS = "Flux2Transformer2DModel"  # the class in diffusers
OUTSIDE_BITS = 8  # the fewest bits per weight that are safe for a Linear outside the blocks: they steer every block


@dataclass(frozen=True)
class Flux2Config(FluxConfig):
    model = "FLUX.2"

    timestep_guidance_channels: int
    guidance_embeds: bool

    def blocks(self) -> list[tuple[str, str]]:
        """(kind, name) in the order of the forward pass."""
        doubles = [("double", f"transformer_blocks.{i}") for i in range(self.num_layers)]
        return doubles + [("single", f"single_transformer_blocks.{i}") for i in range(self.num_single_layers)]

    def shapes(self) -> Shapes:
        """By diffusers' name, in the order of the layers."""
        D, K, F = self.hidden, self.attention_head_dim, int(self.hidden * self.mlp_ratio)
        found: Shapes = {"x_embedder": (D, self.in_channels), "context_embedder": (D, self.joint_attention_dim)}
        for kind in ("timestep", "guidance") if self.guidance_embeds else ("timestep",):
            found[f"time_guidance_embed.{kind}_embedder.linear_1"] = (D, self.timestep_guidance_channels)
            found[f"time_guidance_embed.{kind}_embedder.linear_2"] = (D, D)
        for stream, name in MODULATIONS.items():
            found[f"{name}.linear"] = (3 * D if stream == "single" else 6 * D, D)
        linears = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out")
        double: Shapes = {f"attn.{n}": (D, D) for n in linears}
        double |= {f"attn.{n}": (K,) for n in ("norm_q", "norm_k", "norm_added_q", "norm_added_k")}
        for part in ("ff", "ff_context"):
            double |= {f"{part}.linear_in": (2 * F, D), f"{part}.linear_out": (D, F)}
        single: Shapes = {"attn.to_qkv_mlp_proj": (3 * D + 2 * F, D), "attn.to_out": (D, D + F)}
        single |= {"attn.norm_q": (K,), "attn.norm_k": (K,)}
        found |= {f"transformer_blocks.{i}.{n}": s for i in range(self.num_layers) for n, s in double.items()}
        found |= {f"single_transformer_blocks.{i}.{n}": s for i in range(self.num_single_layers) for n, s in single.items()}
        found |= {"norm_out.linear": (2 * D, D), "proj_out": (self.in_channels, D)}
        return {f"{name}.weight": shape for name, shape in found.items()}


def in_block(name: str) -> bool:
    # Within "single_transformer_blocks." too.
    return "transformer_blocks." in name


def packs_outside(name: str) -> bool:
    """Whether a weight outside the blocks is worth packing: dev has 1.6 GB of them, all but a few MB in these."""
    return name.startswith(("context_embedder", "time_guidance_embed", "norm_out", *MODULATIONS.values()))


REFERENCE_STEP = 10  # distance of two reference images along the first axis of positions; the drawn image is at 0


def image_ids(height: int, width: int, image: int = 0) -> np.ndarray:
    """(tokens, 4): (10 * image, row, column, 0), row by row. Image 0 is drawn; references count from 1."""
    row, col = np.indices((height, width)).reshape(2, -1)
    return np.stack([0 * row + REFERENCE_STEP * image, row, col, 0 * row], axis=-1)


def text_ids(count: int) -> np.ndarray:
    """(count, 4): (0, 0, 0, index), padding included."""
    ids_T4 = np.zeros((count, 4), np.int64)
    ids_T4[:, 3] = np.arange(count)
    return ids_T4


def inputs(
    x_BLC: mx.array,
    size: tuple[int, int],
    text_BTJ: mx.array,
    sigma_B: mx.array,
    guidance: float | None = None,
    references: Sequence[mx.array] = (),
    target_B: mx.array | None = None,
) -> dict[str, Any]:
    """Keyword arguments of `Flux2.enter`; see `Architecture.inputs`. `target_B` is not read."""
    found = {
        "x_BLC": x_BLC,
        "x_ids_L4": image_ids(*size),
        "ctx_BTJ": text_BTJ,
        "ctx_ids_T4": text_ids(text_BTJ.shape[1]),
        "timesteps_B": sigma_B,
        "guidance_B": None if guidance is None else mx.full(sigma_B.shape, guidance),
    }
    if references:
        found["references_BRC"] = mx.concatenate([tokens(each).astype(x_BLC.dtype) for each in references], axis=1)
        ids = [image_ids(each.shape[2], each.shape[3], number) for number, each in enumerate(references, 1)]
        found["references_ids_R4"] = np.concatenate(ids)
    return found


def double_block(
    weights: dict[str, Any], h: tuple[mx.array, ...], shared: Shared, linear: Linear = plain_linear
) -> tuple[mx.array, ...]:
    """Separate weights for text and image, one joint attention. `shared` is what `Flux2.enter` returned."""

    def apply(name: str, x: mx.array) -> mx.array:
        return linear(name, weights[f"{name}.weight"], x)

    def joint(text_name: str, image_name: str, norms: tuple[str, str] | None = None) -> mx.array:
        parts = []
        for i, (name, x) in enumerate(((text_name, text_in), (image_name, image_in))):
            y_BSHK = split_heads(apply(name, x), width)
            parts.append(rotate(rms_norm(y_BSHK, weights[f"{norms[i]}.weight"], EPS), *ropes[i]) if norms else y_BSHK)
        return mx.concatenate(parts, axis=1)

    T, width = shared["text"][0].shape[1], weights["attn.norm_q.weight"].shape[0]
    # Of the text rows, of the image rows.
    ropes = list(zip(*(mx.split(turn, [T], axis=-3) for turn in shared["rope"]), strict=True))
    h_BTD, h_BLD = h
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
    return h_BTD, h_BLD


def single_block(weights: dict[str, Any], h: Streams, shared: Shared, linear: Linear = plain_linear) -> mx.array:
    h_BSD = joined(h)
    mods, rope, hidden = shared["single"], shared["rope"], h_BSD.shape[-1]
    q_norm, k_norm = weights["attn.norm_q.weight"], weights["attn.norm_k.weight"]
    name = "attn.to_qkv_mlp_proj"
    x = linear(name, weights[f"{name}.weight"], modulate(h_BSD, mods))
    # One split, so that the gradients of all five parts are joined once.
    q, k, v, gate, up = mx.split(x, [hidden, 2 * hidden, 3 * hidden, (x.shape[-1] + 3 * hidden) // 2], axis=-1)
    q_BSHK, k_BSHK, v_BSHK = (split_heads(y, q_norm.shape[0]) for y in (q, k, v))
    y_BSD = attend(rotate(rms_norm(q_BSHK, q_norm, EPS), *rope), rotate(rms_norm(k_BSHK, k_norm, EPS), *rope), v_BSHK)
    y_BSF = mx.concatenate([y_BSD, silu_times(gate, up)], axis=-1)
    name = "attn.to_out"
    gate_BSD: mx.array = mods[2]
    return linear(name, weights[f"{name}.weight"], y_BSF) * gate_BSD + h_BSD


class Flux2(PictureTransformer):
    """Predicts the velocity, noise minus clean latent. See `family.Transformer`."""

    kinds = {"double": double_block, "single": single_block}  # noqa: RUF012  (never changed)
    latent = "x_embedder"

    def enter(
        self,
        x_BLC: mx.array,
        x_ids_L4: np.ndarray,
        ctx_BTJ: mx.array,
        ctx_ids_T4: np.ndarray,
        timesteps_B: mx.array,
        guidance_B: mx.array | None = None,
        references_BRC: mx.array | None = None,
        references_ids_R4: np.ndarray | None = None,
    ) -> tuple[Streams, Shared]:
        """(h, what blocks read). Ids: 4 integers; timesteps: noise levels, 0 (clean) to 1. References follow the image."""
        temb_BD = self._embed("timestep", timesteps_B)
        if self.config.guidance_embeds:
            if guidance_B is None:
                raise ValueError("this transformer has a guidance embedding: it needs a guidance value, one per image")
            temb_BD = temb_BD + self._embed("guidance", guidance_B)
        temb_BD = silu(temb_BD)
        L = x_BLC.shape[1]
        ids_S4 = np.concatenate([ctx_ids_T4, x_ids_L4])
        if references_BRC is not None and references_ids_R4 is not None:
            x_BLC = mx.concatenate([x_BLC, references_BRC.astype(x_BLC.dtype)], axis=1)
            ids_S4 = np.concatenate([ids_S4, references_ids_R4])
        T, rows = ctx_BTJ.shape[1], x_BLC.shape[1]
        shared: Shared = {}
        for (stream, name), count in zip(MODULATIONS.items(), (T, rows, T + rows), strict=True):
            shared[stream] = modulation(self._linear(f"{name}.linear", temb_BD), self.config.hidden, count)
        scale_BD, shift_BD = mx.split(self._linear("norm_out.linear", temb_BD), 2, axis=-1)
        shared["out"] = spread([shift_BD, 1 + scale_BD], L)
        shared["rope"] = self.rope(ids_S4)
        h_BTD = self._linear("context_embedder", ctx_BTJ.astype(self.dtype))
        h_BLD = self._linear("x_embedder", x_BLC.astype(self.dtype))
        return (h_BTD, h_BLD), shared

    def leave(self, h_BSD: mx.array, shared: Shared) -> mx.array:
        """Velocity (B, L, C) of the image tokens."""
        T, L = shared["text"][0].shape[1], shared["out"][0].shape[1]
        h_BLD = modulate(h_BSD[:, T : T + L], shared["out"])
        return self._linear("proj_out", h_BLD)

    def _embed(self, kind: str, value_B: mx.array) -> mx.array:
        x = sinusoid(1000 * value_B.astype(mx.float32), self.config.timestep_guidance_channels).astype(self.dtype)
        first, second = (f"time_guidance_embed.{kind}_embedder.linear_{i}" for i in (1, 2))
        return self._linear(second, silu(self._linear(first, x)))
