"""Families of models: what tells one from another, as data. Code asks the record, never the name.

Sizes here serve files that come without a config.json, and the families that the project makes itself; a
config.json beside the weights always wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from stages.models.family import Family
from stages.models.flux2.sizes import (
    AUTOENCODER,
    DEV,
    KLEIN_4B,
    KLEIN_9B,
    MICRO_AUTOENCODER,
    MICRO_QWEN3,
    MICRO_TRANSFORMER,
    MISTRAL_24B,
    QWEN3_4B,
    QWEN3_8B,
    TINY_AUTOENCODER,
    TINY_QWEN3,
    TINY_TRANSFORMER,
)

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
FLUX2 = "stages.models.flux2.architecture:FLUX2"
APACHE = "Apache-2.0"
NON_COMMERCIAL = "FLUX non-commercial"


def _single_files(tail: str) -> dict[str, tuple[str, ...]]:
    """Return, by component, the file names in use for weights that are published as one file."""
    transformer = (f"flux-2-{tail}.safetensors", f"flux2-{tail}.safetensors")
    return {"transformer": transformer, "autoencoder": ("ae.safetensors", "flux2-vae.safetensors")}


_ALL = (
    Family(
        name="klein-base-4b",
        title="FLUX.2 klein base 4B",
        licence=APACHE,
        code=FLUX2,
        transformer=KLEIN_4B,
        text_encoder=QWEN3_4B,
        autoencoder=AUTOENCODER,
        hub="black-forest-labs/FLUX.2-klein-base-4B",
        single_files=_single_files("klein-base-4b"),
        bytes_bf16=BYTES_4B,
    ),
    Family(
        name="klein-base-9b",
        title="FLUX.2 klein base 9B",
        licence=NON_COMMERCIAL,
        code=FLUX2,
        transformer=KLEIN_9B,
        text_encoder=QWEN3_8B,
        autoencoder=AUTOENCODER,
        hub="black-forest-labs/FLUX.2-klein-base-9B",
        gated=True,
        single_files=_single_files("klein-base-9b"),
        bytes_bf16=BYTES_9B,
    ),
    Family(
        name="klein-4b",
        title="FLUX.2 klein 4B, distilled",
        licence=APACHE,
        code=FLUX2,
        transformer=KLEIN_4B,
        text_encoder=QWEN3_4B,
        autoencoder=AUTOENCODER,
        hub="black-forest-labs/FLUX.2-klein-4B",
        single_files=_single_files("klein-4b"),
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
        code=FLUX2,
        transformer=KLEIN_9B,
        text_encoder=QWEN3_8B,
        autoencoder=AUTOENCODER,
        hub="black-forest-labs/FLUX.2-klein-9B",
        gated=True,
        single_files=_single_files("klein-9b"),
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
        code=FLUX2,
        transformer=DEV,
        text_encoder=MISTRAL_24B,
        autoencoder=AUTOENCODER,
        hub="black-forest-labs/FLUX.2-dev",
        gated=True,
        single_files=_single_files("dev"),
        text_kind="mistral3",
        unsupported={
            "text_encoder": "the text encoder of dev (mistral3) is not built yet; families with qwen3 work, such as klein-base-4b"
        },
        text_layers=(10, 20, 30),
        guidance_embedded=True,
        real_cfg=False,
        bytes_bf16=BYTES_DEV,
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
        guidance=3.0,
        sampling_steps=24,
        bundled="data/micro",
        begin=MICRO_BEGIN,
    ),
    Family(
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
