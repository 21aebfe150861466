"""The sizes of a FLUX.2 transformer, and the names and shapes of its weights in the diffusers layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from stages.models.sizes import checked_sizes

Shapes = dict[str, tuple[int, ...]]

EPS = 1e-6  # of every norm, in every released FLUX.2
MODULATIONS = {  # stream of rows -> the Linear that gives its shifts, scales and gates
    "text": "double_stream_modulation_txt",
    "image": "double_stream_modulation_img",
    "single": "single_stream_modulation",
}
TRANSFORMER_CLASS = "Flux2Transformer2DModel"  # the class in diffusers
OUTSIDE_BITS = 8  # the fewest bits per weight that are safe for a Linear outside the blocks: they steer every block


@dataclass(frozen=True)
class Flux2Config:
    """Fields have the names and meanings of the keys in config.json."""

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
        """Raises ValueError if a key is missing or a value is not supported. Unknown keys are ignored."""
        missing = [f.name for f in fields(cls) if f.name not in config]
        if missing:
            raise ValueError(f"the transformer's config lacks {', '.join(missing)}; is this a FLUX.2 transformer?")
        made = cls(**checked_sizes(cls, config, "the transformer's config"))
        if sum(made.axes_dims_rope) != made.attention_head_dim:
            raise ValueError(f"axes_dims_rope {made.axes_dims_rope} must add up to attention_head_dim {made.attention_head_dim}")
        if any(each % 2 for each in made.axes_dims_rope):
            raise ValueError(f"axes_dims_rope must be even numbers, got {made.axes_dims_rope}")
        if made.eps != EPS:
            raise ValueError(f"the transformer's eps must be {EPS}, got {made.eps}")
        return made

    @property
    def hidden(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    def shapes(self) -> Shapes:
        """By diffusers' name, in the order of the layers."""
        found = self._first_shapes()
        for i in range(self.num_layers):
            found |= {f"transformer_blocks.{i}.{n}": s for n, s in self._double_shapes().items()}
        for i in range(self.num_single_layers):
            found |= {f"single_transformer_blocks.{i}.{n}": s for n, s in self._single_shapes().items()}
        found |= {"norm_out.linear": (2 * self.hidden, self.hidden), "proj_out": (self.in_channels, self.hidden)}
        return {f"{name}.weight": shape for name, shape in found.items()}

    @property
    def _mlp(self) -> int:
        return int(self.hidden * self.mlp_ratio)

    def _first_shapes(self) -> Shapes:
        D = self.hidden
        found: Shapes = {"x_embedder": (D, self.in_channels), "context_embedder": (D, self.joint_attention_dim)}
        for kind in ("timestep", "guidance") if self.guidance_embeds else ("timestep",):
            found[f"time_guidance_embed.{kind}_embedder.linear_1"] = (D, self.timestep_guidance_channels)
            found[f"time_guidance_embed.{kind}_embedder.linear_2"] = (D, D)
        for stream, name in MODULATIONS.items():
            found[f"{name}.linear"] = (3 * D if stream == "single" else 6 * D, D)
        return found

    def _double_shapes(self) -> Shapes:
        D, K, F = self.hidden, self.attention_head_dim, self._mlp
        linears = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out")
        found: Shapes = {f"attn.{n}": (D, D) for n in linears}
        found |= {f"attn.{n}": (K,) for n in ("norm_q", "norm_k", "norm_added_q", "norm_added_k")}
        return found | {
            f"{m}.{n}": s for m in ("ff", "ff_context") for n, s in (("linear_in", (2 * F, D)), ("linear_out", (D, F)))
        }

    def _single_shapes(self) -> Shapes:
        D, K, F = self.hidden, self.attention_head_dim, self._mlp
        return {"attn.to_qkv_mlp_proj": (3 * D + 2 * F, D), "attn.to_out": (D, D + F), "attn.norm_q": (K,), "attn.norm_k": (K,)}


def in_block(name: str) -> bool:
    # Within "single_transformer_blocks." too.
    return "transformer_blocks." in name


def packs_outside(name: str) -> bool:
    """Whether a weight outside the blocks is worth packing: dev has 1.6 GB of them, all but a few MB in these."""
    return name.startswith(("context_embedder", "time_guidance_embed", "norm_out", *MODULATIONS.values()))
