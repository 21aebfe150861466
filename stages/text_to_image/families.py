"""The table of model families: code asks a record, never a name. Sizes serve estimates, and where a config.json is missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stages.bundled import MICRO
from stages.models.family import BESIDE, Family, choose

FLUX2 = "stages.models.flux2.architecture:FLUX2"
FLUX3 = "stages.models.flux3.architecture:FLUX3"
Z_IMAGE = "stages.models.z_image.architecture:Z_IMAGE"
APACHE = "Apache-2.0"
NON_COMMERCIAL = "FLUX non-commercial"
KOMMUNITY = "FLUX Kommunity v1.0"

# vae/config.json: one autoencoder serves every released FLUX.2, and FLUX 3 Image.
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


def transformer_sizes(double: int, single: int, heads: int, text_features: int, *, guidance: bool = False) -> dict[str, Any]:
    """A transformer's config.json from its numbers of double and single blocks; the rest is equal in every released model."""
    return {
        "in_channels": 128,
        "out_channels": None,
        "num_layers": double,
        "num_single_layers": single,
        "num_attention_heads": heads,
        "attention_head_dim": 128,
        "joint_attention_dim": text_features,
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


KLEIN_4B = transformer_sizes(5, 20, 24, 7680)
KLEIN_9B = transformer_sizes(8, 24, 32, 12288)
DEV = transformer_sizes(8, 48, 48, 15360, guidance=True)
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

# tiny: every kind of layer occurs and nothing is wide, so that a test runs in seconds on a laptop's CPU.
TINY_TRANSFORMER = transformer_sizes(2, 2, 2, 192) | {"attention_head_dim": 32, "axes_dims_rope": (8, 8, 8, 8)}
TINY_QWEN3 = _qwen3(64, 128, tied=True) | {
    "vocab_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TINY_AUTOENCODER = {**AUTOENCODER, "block_out_channels": (8, 16, 16, 16), "layers_per_block": 1, "norm_num_groups": 4}

# micro: large enough to learn in minutes on a CPU.
MICRO_TRANSFORMER = transformer_sizes(2, 5, 4, 384) | {"attention_head_dim": 64, "axes_dims_rope": (16, 16, 16, 16)}
MICRO_QWEN3 = _qwen3(128, 384, tied=True) | {
    "vocab_size": 1024,
    "num_hidden_layers": 7,  # the last layer is not read, as in the released models
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MICRO_AUTOENCODER = {
    **AUTOENCODER,
    "block_out_channels": (32, 64, 96, 96),
    "decoder_block_out_channels": (48, 80, 112, 112),
    "layers_per_block": 1,
    "norm_num_groups": 8,
}
# micro was trained at these resolutions. The fast BLAS of a CPU has float32 only. A small model takes a larger learning rate.
MICRO_BEGIN: Mapping[str, Mapping[str, Any]] = {
    "buckets": {"resolutions": (128, 160)},
    "embeddings": {"precision": "float32"},
    "train": {"precision": "float32", "steps": 1000, "lr": 3e-3, "batch_size": 4},
    "samples": {"precision": "float32", "width": 160, "height": 160},
}


# FLUX 3 Image Klein: the config.json of its transformer, and the text part of its text encoder.
F3_TRANSFORMER: Mapping[str, Any] = {
    "in_channels": 128,
    "cond_in_channels": 128,
    "num_layers": 5,
    "num_single_layers": 28,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 20480,
    "timestep_channels": 256,
    "mlp_ratio": 3.0,
    "axes_dims_rope": (32, 32, 32, 32),
    "rope_theta": 10000,
    "eps": 1e-6,
    "flow_map": False,
}
QWEN3_VL: Mapping[str, Any] = {"model_type": "qwen3_vl_text", "rope_theta": 5e6}
# All blocks but those of reference images, which get no gradient where there are none. The static shift is the scheduler's.
F3_BEGIN: Mapping[str, Mapping[str, Any]] = {
    "train": {"targets": ("single_transformer_blocks.*", "mode_blocks.image.*", "txt_mode_blocks.*")},
    "train.noise": {"shift": "static", "shift_factor": 6.93},
}
F3_TINY: dict[str, Any] = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 32, "num_attention_heads": 2}
F3_TINY |= {"joint_attention_dim": 192, "axes_dims_rope": (8, 8, 8, 8)}

# Z-Image. Its transformer's config.json, and that of its autoencoder, which is FLUX.1's.
Z_TRANSFORMER: Mapping[str, Any] = {
    "all_patch_size": (2,),
    "all_f_patch_size": (1,),
    "in_channels": 16,
    "dim": 3840,
    "n_layers": 30,
    "n_refiner_layers": 2,
    "n_heads": 30,
    "n_kv_heads": 30,
    "norm_eps": 1e-5,
    "qk_norm": True,
    "cap_feat_dim": 2560,
    "rope_theta": 256.0,
    "t_scale": 1000.0,
    "axes_dims": (32, 48, 48),
    "axes_lens": (1536, 512, 512),
}
Z_AUTOENCODER: Mapping[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 16,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "mid_block_add_attention": True,
}
# Most trainers leave the refiners and the modulation alone; the static shift is that of the model's scheduler.
Z_BEGIN: Mapping[str, Mapping[str, Any]] = {
    "train": {"targets": ("layers.*.attention.*", "layers.*.feed_forward.*")},
    "train.noise": {"shift": "static", "shift_factor": 3.0},
}
Z_TINY: dict[str, Any] = {"in_channels": 16, "dim": 192, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 6, "n_kv_heads": 6}
Z_TINY |= {"cap_feat_dim": 64, "axes_dims": (8, 12, 12)}


def _single_files(tail: str, *text_encoders: str) -> dict[str, tuple[str, ...]]:
    """The usual file names of each component, as alternatives: ("klein-4b", "qwen_3_4b") -> flux-2-klein-4b.safetensors, ..."""
    transformer = (f"flux-2-{tail}.safetensors", f"flux2-{tail}.safetensors")
    return {
        "transformer": transformer,
        "autoencoder": ("ae.safetensors", "flux2-vae.safetensors"),
        "text_encoder": tuple(f"{name}.safetensors" for name in text_encoders),
    }


_BASE_4B = Family(
    name="klein-base-4b",
    title="FLUX.2 klein base 4B",
    licence=APACHE,
    code=FLUX2,
    transformer=KLEIN_4B,
    text_encoder=QWEN3_4B,
    autoencoder=AUTOENCODER,
    hub="black-forest-labs/FLUX.2-klein-base-4B",
    single_files=_single_files("klein-base-4b", "qwen_3_4b", "qwen3-4b"),
    # The smallest family with a free licence.
    meant={
        r"flux[ ._-]?1|flux[ ._-]?(dev|pro)|schnell|kontext": "FLUX.1 is an older model of another architecture, not known here",
        r"^(?!.*flux[ ._-]?3).*klein(?!.*9)|flux[ ._-]?2?$": "",
    },
)
_BASE_9B = replace(
    _BASE_4B,
    name="klein-base-9b",
    title="FLUX.2 klein base 9B",
    licence=NON_COMMERCIAL,
    transformer=KLEIN_9B,
    text_encoder=QWEN3_8B,
    hub="black-forest-labs/FLUX.2-klein-base-9B",
    gated=True,
    single_files=_single_files("klein-base-9b", "qwen_3_8b", "qwen3-8b"),
)


def _single_files_of_z(name: str) -> dict[str, tuple[str, ...]]:
    """The file names of Comfy-Org's repositories."""
    return {
        "transformer": (f"{name}_bf16.safetensors", f"{name}.safetensors"),
        "autoencoder": ("ae.safetensors",),
        "text_encoder": ("qwen_3_4b.safetensors",),
    }


_Z_IMAGE = Family(
    name="z-image",
    title="Z-Image 6B",
    licence=APACHE,
    code=Z_IMAGE,
    transformer=Z_TRANSFORMER,
    text_encoder=QWEN3_4B,
    autoencoder=Z_AUTOENCODER,
    hub="Tongyi-MAI/Z-Image",
    single_files=_single_files_of_z("z_image"),
    text_kind="qwen3_thinking",
    text_layers=(35,),
    text_padding="none",
    references="none",
    guidance=5.0,  # 4 in diffusers, whose factor is less by 1 here
    begin=Z_BEGIN,
    meant={r"z[ ._-]?image": ""},
)


def _single_files_of_f3(name: str) -> dict[str, tuple[str, ...]]:
    """Black Forest Labs' own file has the common name model.safetensors."""
    return {
        "transformer": (f"{name}.safetensors", "model.safetensors"),
        "autoencoder": ("ae.safetensors", "flux2-vae.safetensors"),
        "text_encoder": ("qwen3_vl_4b.safetensors", "qwen_3_vl_4b.safetensors"),
        "tokenizer": ("tokenizer",),
    }


_F3_BASE = Family(
    name="flux3-klein-base",
    title="FLUX 3 Image Klein base 5.5B",
    hub_bytes={"text_encoder": 8_900_000_000},  # with the part that reads pictures
    licence=KOMMUNITY,
    code=FLUX3,
    transformer=F3_TRANSFORMER,
    text_encoder={**QWEN3_4B, **QWEN3_VL},
    autoencoder=AUTOENCODER,
    hub="black-forest-labs/flux-3-image-klein-base",
    gated=True,
    **BESIDE,
    single_files=_single_files_of_f3("flux-3-image-klein-base"),
    text_kind="qwen3_vl",
    text_layers=(4, 8, 12, 16, 20, 24, 28, 32),
    text_tokens=560,
    text_padding="repeated",
    guidance=3.5,
    references="own",
    begin=F3_BEGIN,
    meant={r"flux[ ._-]?3": ""},
)
_DISTILLED: Mapping[str, Any] = {"real_cfg": False, "guidance": 1.0, "sampling_steps": 4}
_TINY = Family(
    name="tiny",
    title="the true architecture with seeded random weights",
    licence=APACHE,
    code=FLUX2,
    transformer=TINY_TRANSFORMER,
    text_encoder=TINY_QWEN3,
    autoencoder=TINY_AUTOENCODER,
    text_layers=(1, 2, 3),
    text_tokens=64,
    sampling_steps=4,
    seeded=0,
)
_ALL = (
    _BASE_4B,
    _BASE_9B,
    replace(
        _BASE_4B,
        name="klein-4b",
        title="FLUX.2 klein 4B, distilled",
        base="klein-base-4b",
        hub="black-forest-labs/FLUX.2-klein-4B",
        single_files=_single_files("klein-4b", "qwen_3_4b", "qwen3-4b"),
        **_DISTILLED,
    ),
    replace(
        _BASE_9B,
        name="klein-9b",
        title="FLUX.2 klein 9B, distilled",
        base="klein-base-9b",
        hub="black-forest-labs/FLUX.2-klein-9B",
        single_files=_single_files("klein-9b", "qwen_3_8b", "qwen3-8b"),
        **_DISTILLED,
    ),
    Family(
        name="dev",
        title="FLUX.2 dev 32B",
        licence=NON_COMMERCIAL,
        code=FLUX2,
        transformer=DEV,
        text_encoder=MISTRAL_24B,
        autoencoder=AUTOENCODER,
        hub="black-forest-labs/FLUX.2-dev",
        gated=True,
        single_files=_single_files("dev", "mistral_3_small_flux2", "mistral-small-3.2-24b-instruct-2506"),
        text_kind="mistral3",
        text_layers=(10, 20, 30),
        text_padding="start",
        guidance_embedded=True,
        real_cfg=False,
        meant={r"flux[ ._-]?2.*dev": ""},
    ),
    _F3_BASE,
    replace(
        _F3_BASE,
        name="flux3-klein",
        title="FLUX 3 Image Klein 5.5B, distilled",
        base="flux3-klein-base",
        hub="black-forest-labs/flux-3-image-klein",
        single_files=_single_files_of_f3("flux-3-image-klein"),
        transformer={**F3_TRANSFORMER, "flow_map": True},
        begin={},
        **{**_DISTILLED, "sampling_steps": 16},
    ),
    _Z_IMAGE,
    replace(
        _Z_IMAGE,
        name="z-image-turbo",
        title="Z-Image Turbo, distilled",
        base="z-image",
        hub="Tongyi-MAI/Z-Image-Turbo",
        hub_bytes={"transformer": 24_620_000_000},  # float32
        single_files=_single_files_of_z("z_image_turbo"),
        real_cfg=False,
        guidance=1.0,
        sampling_steps=8,
        begin={},
    ),
    Family(
        name="micro",
        title="the true architecture, small, trained on flat emoji: to try and to test with",
        licence=APACHE,
        code=FLUX2,
        transformer=MICRO_TRANSFORMER,
        text_encoder=MICRO_QWEN3,
        autoencoder=MICRO_AUTOENCODER,
        text_layers=(2, 4, 6),
        text_tokens=48,
        first_row=(1.449, 1.972, 4.167),
        guidance=3.0,
        sampling_steps=24,
        bundled=MICRO,
        begin=MICRO_BEGIN,
    ),
    _TINY,
    replace(
        _TINY,
        name="tiny-distilled",
        title="the same with other random weights, which takes the place of a distilled model in tests",
        base="tiny",
        seeded=1,
        **{**_DISTILLED, "sampling_steps": 2},
    ),
    replace(
        _Z_IMAGE,
        name="z-image-tiny",
        title="Z-Image's architecture with seeded random weights",
        hub="",
        seeded=0,
        transformer={**Z_TRANSFORMER, **Z_TINY},
        text_encoder=TINY_QWEN3,
        autoencoder={**Z_AUTOENCODER, "block_out_channels": (8, 16, 16, 16), "layers_per_block": 1, "norm_num_groups": 4},
        text_layers=(3,),
        text_tokens=64,
        sampling_steps=4,
    ),
    replace(
        _F3_BASE,
        name="flux3-tiny",
        hub_bytes={},
        title="FLUX 3 Image's architecture with seeded random weights",
        licence=APACHE,
        hub="",
        gated=False,
        seeded=0,
        transformer={**F3_TRANSFORMER, **F3_TINY},
        text_encoder={**TINY_QWEN3, **QWEN3_VL},
        autoencoder=TINY_AUTOENCODER,
        text_layers=(1, 2, 3),
        text_tokens=160,
        sampling_steps=4,
    ),
)
FAMILIES: dict[str, Family] = {f.name: f for f in _ALL}


def family(name: str) -> Family:
    """Raises ValueError, with the family that is nearest."""
    return choose(FAMILIES, name)
