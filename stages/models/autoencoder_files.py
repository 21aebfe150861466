"""Reads the weights of an autoencoder, from the diffusers layout or Black Forest Labs' single files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from stages.kernels import Arrays
from stages.models import weights
from stages.models.autoencoder import AutoencoderConfig, arrange
from stages.models.family import Family
from stages.models.folders import component_config, read_config

ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
Config = TypeVar("Config", bound=AutoencoderConfig)


def load_arrays(path: Path, config: AutoencoderConfig, **settings: Any) -> Arrays:
    """As `weights.load_component` does, arranged for `Autoencoder`."""
    single = is_single_file(weights.read_shapes(path))
    convert = autoencoder_to_diffusers if single else None
    return weights.load_component(path, config.shapes(), convert=convert, arrange=arrange, **settings)


def is_single_file(keys: Iterable[str]) -> bool:
    """Whether some name is of Black Forest Labs' code."""
    return any(weights.strip_prefix(k).startswith(("encoder.down.", "decoder.up.")) for k in keys)


def autoencoder_config(kind: type[Config], path: Path | None, family: Family) -> Config:
    """From config.json. Without one, the decoder's widths come from the weights, if all are there, and the rest from `family`."""
    if path is None or read_config(path):
        return kind.from_dict(component_config(path, family.autoencoder))
    levels = len(family.autoencoder["block_out_channels"])
    shapes = weights.read_shapes(path)
    named = [
        (f"decoder.up.{i}.block.0.conv1.weight", f"decoder.up_blocks.{levels - 1 - i}.resnets.0.conv1.weight")
        for i in range(levels)
    ]
    found = [shapes[name][0] for pair in named for name in pair if name in shapes]
    widths = {"decoder_block_out_channels": tuple(found)} if len(found) == levels else {}
    return kind.from_dict({**family.autoencoder, **widths})


def autoencoder_to_diffusers(arrays: Arrays) -> Arrays:
    """The 1 x 1 convolutions of the attention become matrices."""
    levels = 1 + max((int(m[1]) for k in arrays if (m := re.match(r"decoder\.up\.(\d+)\.", k))), default=0)
    converted: Arrays = {}
    for found, value in arrays.items():
        key = _autoencoder_key(found, levels)
        flat = ".attentions.0.to_" in key and value.ndim == 4
        converted[key] = value.reshape(value.shape[0], -1) if flat else value
    return converted


def _autoencoder_key(key: str, levels: int) -> str:
    # The file and diffusers number the decoder's levels in opposite order.
    if match := re.fullmatch(r"(encoder|decoder)\.(down|up)\.(\d+)\.(?:block\.(\d+)|(?:down|up)sample\.conv)\.(.+)", key):
        side, way, level, number, rest = match.groups()
        at = int(level) if way == "down" else levels - 1 - int(level)
        inside = f"resnets.{number}.{rest.replace('nin_shortcut', 'conv_shortcut')}" if number else f"{way}samplers.0.conv.{rest}"
        return f"{side}.{way}_blocks.{at}.{inside}"
    if match := re.fullmatch(r"(encoder|decoder)\.mid\.block_(\d)\.(.+)", key):
        return f"{match[1]}.mid_block.resnets.{int(match[2]) - 1}.{match[3]}"
    if (match := re.fullmatch(r"(encoder|decoder)\.mid\.attn_1\.(\w+)\.(weight|bias)", key)) and match[2] in ATTENTION:
        return f"{match[1]}.mid_block.attentions.0.{ATTENTION[match[2]]}.{match[3]}"
    for old, new in (("encoder.quant_conv", "quant_conv"), ("decoder.post_quant_conv", "post_quant_conv")):
        if key.startswith(old):
            return new + key[len(old) :]
    return re.sub(r"^(encoder|decoder)\.norm_out\.", r"\1.conv_norm_out.", key)
