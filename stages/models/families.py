"""Families of models: what tells one from another, as data. Code asks the record, never the name.

Sizes here serve files that come without a config.json, and the families that the project makes itself; a
config.json beside the weights always wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

# A family's components and where each lies in a folder of the diffusers layout.
FOLDERS = {"transformer": "transformer", "autoencoder": "vae", "text_encoder": "text_encoder", "tokenizer": "tokenizer"}

# FLUX.2's autoencoder: one for every released family.
AUTOENCODER: Mapping[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 32,
    "block_out_channels": (128, 256, 512, 512),
    "decoder_block_out_channels": None,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "patch_size": (2, 2),
    "batch_norm_eps": 1e-4,
    "use_quant_conv": True,
    "use_post_quant_conv": True,
    "mid_block_add_attention": True,
}


@dataclass(frozen=True)
class Family:
    """One family. `transformer`, `autoencoder` and `text_encoder` use the names of the released config files."""

    name: str
    title: str
    licence: str
    transformer: Mapping[str, Any]
    text_encoder: Mapping[str, Any]
    autoencoder: Mapping[str, Any] = field(default_factory=lambda: AUTOENCODER)
    hub: str = ""  # hub id of the weights, diffusers layout; empty: none is published
    gated: bool = False  # the licence must be accepted before the hub serves the files
    single_files: tuple[str, ...] = ()  # names of the transformer as one file, BFL layout
    text_kind: str = "qwen3"  # architecture and prompt form of the text encoder
    text_layers: tuple[int, ...] = (9, 18, 27)  # hidden states that are concatenated; 0 would be the embedding
    text_tokens: int = 512  # rows of an embedding, padding included
    guidance_embedded: bool = False  # guidance is an input of the transformer
    real_cfg: bool = True  # guidance is two passes, with and without the prompt
    distilled: bool = False  # made for few steps; LoRAs are trained on the base model instead
    guidance: float = 4.0  # default when sampling
    sampling_steps: int = 50  # default when sampling
    bundled: str = ""  # folder of the weights in the checkout, where they are part of it
    seeded: int | None = None  # seed, where the project makes the weights itself
    bytes_bf16: Mapping[str, int] = field(default_factory=dict)  # component -> bytes as bfloat16, the layers needed
    begin: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # section -> settings with which a new project begins

    @property
    def source(self) -> str:
        """Where the weights come from where a project names none, in words."""
        return self.hub or (f"{self.bundled}, part of the checkout" if self.bundled else "made by the project")


def _transformer(double: int, single: int, heads: int, joint: int, *, guidance: bool = False) -> dict[str, Any]:
    """FLUX.2's transformer by its four sizes; the rest never varies among the released ones."""
    return {
        "in_channels": 128,
        "out_channels": None,
        "num_layers": double,
        "num_single_layers": single,
        "num_attention_heads": heads,
        "attention_head_dim": 128,
        "joint_attention_dim": joint,
        "mlp_ratio": 3.0,
        "axes_dims_rope": (32, 32, 32, 32),
        "rope_theta": 2000,
        "timestep_guidance_channels": 256,
        "guidance_embeds": guidance,
        "eps": 1e-6,
    }


def _qwen3(hidden: int, inner: int, *, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
    }


KLEIN_4B = _transformer(5, 20, 24, 7680)
KLEIN_9B = _transformer(8, 24, 32, 12288)
DEV = _transformer(8, 48, 48, 15360, guidance=True)
QWEN3_4B = _qwen3(2560, 9728, tied=True)
QWEN3_8B = _qwen3(4096, 12288, tied=False)
MISTRAL_24B: Mapping[str, Any] = {
    "model_type": "mistral3",
    "vocab_size": 131072,
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e9,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
# The true architecture, small enough for a laptop's CPU: every kind of layer occurs, nothing is wide.
TINY_TRANSFORMER: Mapping[str, Any] = _transformer(2, 2, 2, 192) | {"attention_head_dim": 32, "axes_dims_rope": (8, 8, 8, 8)}
TINY_QWEN3: Mapping[str, Any] = _qwen3(64, 128, tied=True) | {
    "vocab_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TINY_AUTOENCODER: Mapping[str, Any] = {
    **AUTOENCODER,
    "block_out_channels": (8, 16, 16, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
}
# The same at a size that learns in minutes on a CPU: 16 pixels to an image token, as in the released ones.
MICRO_TRANSFORMER: Mapping[str, Any] = _transformer(2, 5, 4, 384) | {"attention_head_dim": 64, "axes_dims_rope": (16, 16, 16, 16)}
MICRO_QWEN3: Mapping[str, Any] = _qwen3(128, 384, tied=True) | {
    "vocab_size": 1024,
    "num_hidden_layers": 7,  # the last is not read, as in the released ones
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MICRO_AUTOENCODER: Mapping[str, Any] = {
    **AUTOENCODER,
    "block_out_channels": (32, 64, 96, 96),
    "decoder_block_out_channels": (48, 80, 112, 112),
    "layers_per_block": 1,
    "norm_num_groups": 8,
}
# It was trained at these sizes; float32 is what the CPU's fast matrix library has; a small model moves further at a step.
MICRO_BEGIN: Mapping[str, Mapping[str, Any]] = {
    "buckets": {"resolutions": (128, 160)},
    "embeddings": {"precision": "float32"},
    "train": {"precision": "float32", "steps": 1000, "lr": 3e-3, "batch_size": 4},
    "samples": {"precision": "float32", "width": 160, "height": 160},
}

BYTES_4B = {"transformer": 7_751_089_152, "text_encoder": 6_230_000_000, "autoencoder": 168_092_744}
BYTES_9B = {"transformer": 18_157_162_496, "text_encoder": 11_660_000_000, "autoencoder": 168_092_744}
BYTES_DEV = {"transformer": 64_446_562_304, "text_encoder": 34_700_000_000, "autoencoder": 168_092_744}
APACHE = "Apache-2.0"
NON_COMMERCIAL = "FLUX non-commercial"


def _bfl(tail: str) -> tuple[str, ...]:
    """Both spellings in use for the transformer as one file."""
    return (f"flux-2-{tail}.safetensors", f"flux2-{tail}.safetensors")


_ALL = (
    Family(
        name="klein-base-4b",
        title="FLUX.2 klein base 4B",
        licence=APACHE,
        transformer=KLEIN_4B,
        text_encoder=QWEN3_4B,
        hub="black-forest-labs/FLUX.2-klein-base-4B",
        single_files=_bfl("klein-base-4b"),
        bytes_bf16=BYTES_4B,
    ),
    Family(
        name="klein-base-9b",
        title="FLUX.2 klein base 9B",
        licence=NON_COMMERCIAL,
        transformer=KLEIN_9B,
        text_encoder=QWEN3_8B,
        hub="black-forest-labs/FLUX.2-klein-base-9B",
        gated=True,
        single_files=_bfl("klein-base-9b"),
        bytes_bf16=BYTES_9B,
    ),
    Family(
        name="klein-4b",
        title="FLUX.2 klein 4B, distilled",
        licence=APACHE,
        transformer=KLEIN_4B,
        text_encoder=QWEN3_4B,
        hub="black-forest-labs/FLUX.2-klein-4B",
        single_files=_bfl("klein-4b"),
        real_cfg=False,
        distilled=True,
        guidance=1.0,
        sampling_steps=4,
        bytes_bf16=BYTES_4B,
    ),
    Family(
        name="klein-9b",
        title="FLUX.2 klein 9B, distilled",
        licence=NON_COMMERCIAL,
        transformer=KLEIN_9B,
        text_encoder=QWEN3_8B,
        hub="black-forest-labs/FLUX.2-klein-9B",
        gated=True,
        single_files=_bfl("klein-9b"),
        real_cfg=False,
        distilled=True,
        guidance=1.0,
        sampling_steps=4,
        bytes_bf16=BYTES_9B,
    ),
    Family(
        name="dev",
        title="FLUX.2 dev 32B",
        licence=NON_COMMERCIAL,
        transformer=DEV,
        text_encoder=MISTRAL_24B,
        hub="black-forest-labs/FLUX.2-dev",
        gated=True,
        single_files=_bfl("dev"),
        text_kind="mistral3",
        text_layers=(10, 20, 30),
        guidance_embedded=True,
        real_cfg=False,
        bytes_bf16=BYTES_DEV,
    ),
    Family(
        name="micro",
        title="the true architecture, small, trained on flat emoji: to try and to test with",
        licence=APACHE,
        transformer=MICRO_TRANSFORMER,
        text_encoder=MICRO_QWEN3,
        autoencoder=MICRO_AUTOENCODER,
        text_layers=(2, 4, 6),
        text_tokens=48,
        guidance=3.0,
        sampling_steps=24,
        bundled="data/micro",
        begin=MICRO_BEGIN,
    ),
    Family(
        name="tiny",
        title="the true architecture with seeded random weights",
        licence=APACHE,
        transformer=TINY_TRANSFORMER,
        text_encoder=TINY_QWEN3,
        autoencoder=TINY_AUTOENCODER,
        text_layers=(1, 2, 3),
        text_tokens=64,
        sampling_steps=4,
        seeded=0,
    ),
)
FAMILIES: dict[str, Family] = {f.name: f for f in _ALL}


def family(name: str) -> Family:
    """The family of that name; a name that is none is a ValueError with the nearest one."""
    if name in FAMILIES:
        return FAMILIES[name]
    near = get_close_matches(name.lower(), FAMILIES, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ValueError(f"there is no family {name!r}{hint} Families: {', '.join(FAMILIES)}")
