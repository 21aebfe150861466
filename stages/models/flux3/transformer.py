"""The transformer of FLUX 3 Image as a chain of blocks, as `family.Transformer` describes it.

The residual stream is first an array for each of the text, the image and the reference images, which pass through blocks of their
own, then one array of all their rows, which passes through the joint blocks. Only image rows are at the image's noise
level; text and references are at 0. The distilled model, a flow map, also reads the level that a step goes to.
Sources: diffusers' Flux3Transformer2DModel, whose names of weights these are; flux3-mlx and mflux agree with it.
B batch, T text rows, L image rows, R reference rows, S = T + L + R, C latent channels, J text features, D hidden width,
F feed-forward width, H heads, K head width.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
import numpy as np

from stages.models.attention import plain_linear, rms_norm, silu
from stages.models.family import Linear
from stages.models.layers import EPS, attend, modulate, modulation, rotate, sinusoid, split_heads, spread, swiglu, tokens
from stages.models.transformer import FluxConfig, PictureTransformer, Shapes, Shared, Streams, joined

WINDOW = 80  # a text has a multiple of so many rows
SHIFT = 6.93  # of the noise levels of drawing, towards 1
STEP = 0.5  # distance of two neighbouring tokens of an image along an axis of positions
TRANSFORMER_CLASS = "Flux3Transformer2DModel"  # the class in diffusers
OUTSIDE_BITS = 8  # the fewest bits per weight that are safe for a Linear outside the blocks: they steer every block
# Stream, which is also the kind of its blocks -> what names of weights call it, and how the names of its blocks begin.
STREAMS = {"text": "txt", "image": "image", "reference": "image_cond"}
HEADS = {"text": "txt_mode_blocks", "image": "mode_blocks.image", "reference": "mode_blocks.image_cond"}
JOINT = "single_transformer_blocks"
MODULATIONS = ("early_stream_modulations", "single_stream_modulations")  # of a stream's own blocks, and of the joint ones
EMBEDDERS = ("timestep_embedder", "target_timestep_embedder")


@dataclass(frozen=True)
class Flux3Config(FluxConfig):
    model = "FLUX 3"

    cond_in_channels: int
    timestep_channels: int
    flow_map: bool
    references: bool = True  # no key: whether the weights that only reference images need are there

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        made = super().from_dict(config)
        if len(made.axes) != 4:
            raise ValueError(f"axes_dims_rope must have 4 numbers, got {made.axes}")
        if made.cond_in_channels != made.in_channels:
            raise ValueError(f"cond_in_channels must be in_channels, {made.in_channels}, got {made.cond_in_channels}")
        return made

    @property
    def streams(self) -> list[str]:
        return [stream for stream in STREAMS if self.references or stream != "reference"]

    def blocks(self) -> list[tuple[str, str]]:
        """(kind, name) in the order of the forward pass."""
        own = [(stream, f"{HEADS[stream]}.{i}") for stream in self.streams for i in range(self.num_layers)]
        return own + [("joint", f"{JOINT}.{i}") for i in range(self.num_single_layers)]

    def shapes(self) -> Shapes:
        """By diffusers' name."""
        D, K, F, C = self.hidden, self.attention_head_dim, int(self.hidden * self.mlp_ratio), self.in_channels
        found: Shapes = {f"x_embedders.{STREAMS[s]}": (D, C) for s in self.streams if s != "text"}
        found["context_embedder"] = (D, self.joint_attention_dim)
        for embedder in EMBEDDERS if self.flow_map else EMBEDDERS[:1]:
            found |= {f"{embedder}.linear_1": (D, self.timestep_channels), f"{embedder}.linear_2": (D, D)}
        found |= {f"{m}.{STREAMS[s]}.linear": (3 * D, D) for m in MODULATIONS for s in self.streams}
        block: Shapes = {f"attn.{n}": (D, D) for n in ("to_q", "to_k", "to_v", "to_out.0")}
        block |= {"attn.norm_q": (K,), "attn.norm_k": (K,), "ff.linear_in": (2 * F, D), "ff.linear_out": (D, F)}
        found |= {f"{name}.{n}": shape for _, name in self.blocks() for n, shape in block.items()}
        found |= {"norm_out.linear": (2 * D, D), "proj_out": (C, D)}
        return {f"{name}.weight": shape for name, shape in found.items()}


def in_block(name: str) -> bool:
    return name.startswith(tuple(f"{head}." for head in (*HEADS.values(), JOINT)))


def packs_outside(name: str) -> bool:
    """Whether a weight outside the blocks is worth packing: all but a few MB are in these."""
    return name.startswith(("context_embedder", "norm_out", *EMBEDDERS, *MODULATIONS))


def text_rows(tokens: int) -> int:
    return -(-tokens // WINDOW) * WINDOW


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
    """Keyword arguments of `Flux3.enter`; see `Architecture.inputs`. `guidance` is not read, nor `tokens_B`: the last row of a
    text is repeated to level a batch, as it is to fill the text's window.
    """
    found = {"x_BLC": x_BLC, "x_ids_L4": image_ids(size), "ctx_BTJ": text_BTJ, "sigma_B": sigma_B, "target_B": target_B}
    if references:
        found["references_BRC"] = mx.concatenate([tokens(each).astype(x_BLC.dtype) for each in references], axis=1)
        ids = [image_ids(each.shape[2:], -number) for number, each in enumerate(references, 1)]
        found["references_ids_R4"] = np.concatenate(ids)
    return found


def image_ids(size: Sequence[int], last: int = 0) -> np.ndarray:
    """(tokens, 4): (0, row / 2, column / 2, last), row by row; `last` is 0 for the image, and -1, -2, ... for references."""
    row, col = STEP * np.indices(tuple(size)).reshape(2, -1)
    return np.stack([0 * row, row, col, 0 * row + last], axis=-1)


def _text_ids(count: int) -> np.ndarray:
    """(count, 4): (0, 0, 0, index), padding included."""
    return np.pad(np.arange(count, dtype=np.float64)[:, None], [(0, 0), (3, 0)])


def own_block(
    stream: str, weights: dict[str, Any], h: tuple[mx.array, ...], shared: Shared, linear: Linear = plain_linear
) -> tuple[mx.array, ...]:
    """A block that one stream passes through alone; the identity for references if there are none."""
    if stream not in shared:
        return h
    at, mods = list(STREAMS).index(stream), shared[stream]
    y_BSD = _block(weights, h[at], modulate(h[at], mods), mods[2], shared[f"{stream}_rope"], linear)
    return *h[:at], y_BSD, *h[at + 1 :]


def joint_block(weights: dict[str, Any], h: Streams, shared: Shared, linear: Linear = plain_linear) -> mx.array:
    h_BSD = joined(h)
    shift_BSD, scale_BSD, gate_BSD = shared["joint"]
    y_BSD = mx.fast.layer_norm(h_BSD, None, None, EPS) * scale_BSD + shift_BSD
    return _block(weights, h_BSD, y_BSD, gate_BSD, shared["rope"], linear)


def _block(
    weights: dict[str, Any], h_BSD: mx.array, y_BSD: mx.array, gate_BSD: mx.array, rope: list[mx.array], linear: Linear
) -> mx.array:
    """Attention and feed-forward side by side, both of `y_BSD`, which is `h_BSD` normalised and modulated."""

    def apply(name: str, x: mx.array) -> mx.array:
        return linear(name, weights[f"{name}.weight"], x)

    def heads(name: str) -> mx.array:
        return split_heads(apply(f"attn.{name}", y_BSD), weights["attn.norm_q.weight"].shape[0])

    q_BSHK, k_BSHK = (rotate(rms_norm(heads(f"to_{n}"), weights[f"attn.norm_{n}.weight"], EPS), *rope) for n in ("q", "k"))
    attended_BSD = apply("attn.to_out.0", attend(q_BSHK, k_BSHK, heads("to_v")))
    return (attended_BSD + apply("ff.linear_out", swiglu(apply("ff.linear_in", y_BSD)))) * gate_BSD + h_BSD


class Flux3(PictureTransformer):
    """Predicts the velocity, noise minus clean latent. See `family.Transformer`."""

    kinds = {stream: functools.partial(own_block, stream) for stream in STREAMS} | {"joint": joint_block}
    latent = "x_embedders.image"

    def enter(
        self,
        x_BLC: mx.array,
        x_ids_L4: np.ndarray,
        ctx_BTJ: mx.array,
        sigma_B: mx.array,
        target_B: mx.array | None = None,
        references_BRC: mx.array | None = None,
        references_ids_R4: np.ndarray | None = None,
    ) -> tuple[Streams, Shared]:
        """(h, what blocks read). `sigma_B`: noise levels, 0 (clean) to 1; `target_B`: those that a step goes to, which a flow
        map reads; None: `sigma_B`, for the velocity at this moment.
        """
        image_BD, clean_BD = (self._embed(EMBEDDERS[0], each_B) for each_B in (sigma_B, mx.zeros_like(sigma_B)))
        if self.config.flow_map:
            target_BD = self._embed(EMBEDDERS[1], sigma_B if target_B is None else target_B)
            image_BD, clean_BD = image_BD + target_BD, clean_BD + target_BD
        image_BD, clean_BD = silu(image_BD), silu(clean_BD)
        h_BTD = self._filled(self._linear("context_embedder", ctx_BTJ.astype(self.dtype)))
        streams = {
            "text": (h_BTD, _text_ids(h_BTD.shape[1]), clean_BD),
            "image": (self._linear(self.latent, x_BLC.astype(self.dtype)), x_ids_L4, image_BD),
        }
        if references_BRC is not None and references_ids_R4 is not None:
            if not self.config.references:
                raise ValueError("the weights that read reference images were not loaded")
            h_BRD = self._linear(f"x_embedders.{STREAMS['reference']}", references_BRC.astype(self.dtype))
            streams["reference"] = (h_BRD, references_ids_R4, clean_BD)
        shared: Shared = {f"{stream}_rope": self.rope(ids_S4) for stream, (_, ids_S4, _) in streams.items()}
        joint = []
        for stream, (rows_BSD, _, time_BD) in streams.items():
            own, together = (
                modulation(self._linear(f"{m}.{STREAMS[stream]}.linear", time_BD), self.config.hidden, rows_BSD.shape[1])
                for m in MODULATIONS
            )
            shared[stream] = own
            joint.append(together)
        shared["joint"] = [mx.concatenate(list(parts), axis=1) for parts in zip(*joint, strict=True)]
        shared["rope"] = self.rope(np.concatenate([ids_S4 for _, ids_S4, _ in streams.values()]))
        scale_BD, shift_BD = mx.split(self._linear("norm_out.linear", image_BD), 2, axis=-1)
        shared["out"] = spread([shift_BD, 1 + scale_BD], x_BLC.shape[1])
        return tuple(rows_BSD for rows_BSD, _, _ in streams.values()), shared

    def leave(self, h_BSD: mx.array, shared: Shared) -> mx.array:
        """Velocity (B, L, C) of the image tokens."""
        T, L = (shared[f"{stream}_rope"][0].shape[0] for stream in ("text", "image"))
        return self._linear("proj_out", modulate(h_BSD[:, T : T + L], shared["out"]))

    def _embed(self, embedder: str, value_B: mx.array) -> mx.array:
        x = sinusoid(1000 * value_B.astype(mx.float32), self.config.timestep_channels).astype(self.dtype)
        return self._linear(f"{embedder}.linear_2", silu(self._linear(f"{embedder}.linear_1", x)))

    @staticmethod
    def _filled(h_BTD: mx.array) -> mx.array:
        # All rows of padding are equal, so that one is stored.
        B, T, D = h_BTD.shape
        more = text_rows(T) - T
        return mx.concatenate([h_BTD, mx.broadcast_to(h_BTD[:, -1:], (B, more, D))], axis=1) if more else h_BTD
