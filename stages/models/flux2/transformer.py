"""The FLUX.2 transformer as a chain of blocks. A caller can run block after block, replace its Linears, or call all of it.

The residual stream is one array, text rows before image rows, in the dtype of the weights. Names of weights are those of the
diffusers layout. B batch, T text rows, L image rows, S = T + L rows, C latent channels, J text features, D hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models.elementwise import silu
from stages.models.flux2.blocks import Linear, Shared, double_block, plain_linear, single_block, text_rows
from stages.models.flux2.config import MODULATIONS, Flux2Config, in_block
from stages.models.flux2.layers import modulate, modulation, spread

TABLES_KEPT = 32  # rotary tables in memory: one per image shape, 2.4 MB at 1024 px


@dataclass(frozen=True)
class Block:
    kind: str  # double or single
    name: str  # transformer_blocks.0
    weights: dict[str, Any]  # by name within the block: attn.to_q.weight


class Flux2:
    """Predicts the velocity, noise minus clean latent. See `protocols.Transformer`."""

    def __init__(self, config: Flux2Config, weights: Mapping[str, Any]) -> None:
        """`weights`: arrays or packed ones; outside the blocks these have `dense()`, and x_embedder must be an array."""
        self.config = config
        self.top: dict[str, Any] = {}
        doubles = [Block("double", f"transformer_blocks.{i}", {}) for i in range(config.num_layers)]
        singles = [Block("single", f"single_transformer_blocks.{i}", {}) for i in range(config.num_single_layers)]
        self.blocks = doubles + singles
        by_name = {block.name: block for block in self.blocks}
        for name in config.shapes():
            head, number, rest = [*name.split(".", 2), "", ""][:3]
            if block := by_name.get(f"{head}.{number}"):
                block.weights[rest] = weights[name]
            else:
                self.top[name] = weights[name]
        self._tables: dict[bytes, list[mx.array]] = {}

    @property
    def dtype(self) -> mx.Dtype:
        found: mx.Dtype = self.top["x_embedder.weight"].dtype
        return found

    def linears(self) -> dict[str, tuple[int, int]]:
        inside = {n.removesuffix(".weight"): s for n, s in self.config.shapes().items() if in_block(n)}
        return {name: (shape[0], shape[1]) for name, shape in inside.items() if len(shape) == 2}

    @staticmethod
    def block(kind: str) -> Callable[..., mx.array]:
        return {"double": double_block, "single": single_block}[kind]

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
    ) -> tuple[mx.array, Shared]:
        """(h_BSD, what all blocks read). Ids are positions of four integers; timesteps are noise levels, 0 (clean) to 1.

        Rows of references, (B, R, C), follow the image's. Raises ValueError if a model with a guidance input gets no guidance.
        """
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
        shared["rope"] = self._rope(ids_S4)
        # Only the shape is read, by `text_rows`.
        shared["ctx_ids"] = mx.array(np.asarray(ctx_ids_T4, np.int32))
        h_BTD = self._linear("context_embedder", ctx_BTJ.astype(self.dtype))
        h_BLD = self._linear("x_embedder", x_BLC.astype(self.dtype))
        return mx.concatenate([h_BTD, h_BLD], axis=1), shared

    def leave(self, h_BSD: mx.array, shared: Shared) -> mx.array:
        """Velocity (B, L, C) of the image tokens."""
        T, L = text_rows(shared), shared["out"][0].shape[1]
        h_BLD = modulate(h_BSD[:, T : T + L], shared["out"])
        return self._linear("proj_out", h_BLD)

    def __call__(
        self,
        x_BLC: mx.array,
        x_ids_L4: np.ndarray,
        ctx_BTJ: mx.array,
        ctx_ids_T4: np.ndarray,
        timesteps_B: mx.array,
        guidance_B: mx.array | None = None,
        references_BRC: mx.array | None = None,
        references_ids_R4: np.ndarray | None = None,
        linear_for: Callable[[str], Linear] | None = None,
    ) -> mx.array:
        """Velocity in the shape of `x_BLC`. `linear_for(block name)` gives the `linear` of a block, to apply an adapter."""
        h_BSD, shared = self.enter(
            x_BLC, x_ids_L4, ctx_BTJ, ctx_ids_T4, timesteps_B, guidance_B, references_BRC, references_ids_R4
        )
        for block in self.blocks:
            linear = linear_for(block.name) if linear_for else plain_linear
            h_BSD = self.block(block.kind)(block.weights, h_BSD, shared, linear)
        return self.leave(h_BSD, shared)

    def _embed(self, kind: str, value_B: mx.array) -> mx.array:
        # Exponents are rounded to float32 as in Black Forest Labs' code: the last bit of a frequency changes the angle a
        # thousandfold. The sinusoid is float32, as bfloat16 would round 937 to 936.
        half = self.config.timestep_guidance_channels // 2
        exponents = np.float32(-math.log(10000)) * np.arange(half, dtype=np.float32) / np.float32(half)
        freqs = mx.array(np.exp(exponents.astype(np.float64)), mx.float32)
        angles = 1000 * value_B.astype(mx.float32)[:, None] * freqs
        x = mx.concatenate([mx.cos(angles), mx.sin(angles)], axis=-1).astype(self.dtype)
        first, second = (f"time_guidance_embed.{kind}_embedder.linear_{i}" for i in (1, 2))
        return self._linear(second, silu(self._linear(first, x)))

    def _linear(self, name: str, x: mx.array) -> mx.array:
        return plain_linear(name, self.top[f"{name}.weight"], x)

    def _rope(self, ids_S4: np.ndarray) -> list[mx.array]:
        """[cosines, sines], float32 (S, 1, K), equal for features 2n and 2n + 1. Angles are computed in float64."""
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
    """For estimates of memory: weights are lazy zeros."""
    return Flux2(config, {name: mx.zeros(shape, dtype) for name, shape in config.shapes().items()})
