"""Unpacks weights stored in 8 bits or fewer, lazily: fp8 with or without scales, and MLX's quantised layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

Arrays = dict[str, mx.array]

FP8 = ("F8_E4M3", "F8_E5M2")
# Names of the scale of X.weight, and names that only matter for computing in 8 bits.
SCALES = ("weight_scale", "scale_weight")
UNUSED = re.compile(r"(^|\.)(input_scale|scale_input|comfy_quant|scaled_fp8)$")
OTHER = re.compile(r"\.(weight_scale_2|weight_scale_inv|qweight|qzeros|absmax|quant_map|_scale|_data)$")  # other quantisers
MLX_PARTS = ("scales", "biases")
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
GROUP = 64  # MLX's default


def is_packed(dtypes: Mapping[str, str]) -> bool:
    """`dtypes` by name, as safetensors spells them."""
    return any(dtype in FP8 or (dtype == "U32" and name.endswith(".weight")) for name, dtype in dtypes.items()) or any(
        OTHER.search(name) or name.endswith(SCALES) for name in dtypes
    )


def unpack(arrays: Arrays, dtypes: Mapping[str, str], config: Mapping[str, Any], path: Path) -> Arrays:
    """Tensors as floating-point numbers, scales left out. In `arrays`, fp8 is uint8; `config` states the bits of MLX's layers.

    Raises ValueError if a quantisation is not supported or a scale has a wrong shape.
    """
    if foreign := next((name for name in arrays if OTHER.search(name)), ""):
        raise ValueError(f"{path} is quantised in a way that is not read ({foreign}): fetch the bfloat16 or the fp8 weights")
    used: set[str] = set()
    done: Arrays = {}
    for name, value in arrays.items():
        stem = name.removesuffix(".weight")
        if dtypes[name] in FP8:
            used |= {scale for part in SCALES if (scale := f"{stem}.{part}") in arrays}
            done[name] = _scaled(name, _from_fp8(value, dtypes[name]), arrays, path)
        elif dtypes[name] == "U32" and name.endswith(".weight"):
            used |= {f"{stem}.{part}" for part in MLX_PARTS}
            done[name] = _dequantized(stem, arrays, config, path)
        else:
            done[name] = value
    return {name: value for name, value in done.items() if name not in used and not UNUSED.search(name)}


def _from_fp8(value: mx.array, dtype: str) -> mx.array:
    if dtype == "F8_E4M3":
        return mx.from_fp8(value, mx.float32)
    # The five-bit exponent of e5m2 is that of float16, of which it is the upper byte.
    return mx.left_shift(value.astype(mx.uint16), mx.array(8, mx.uint16)).view(mx.float16).astype(mx.float32)


def _scaled(name: str, value: mx.array, arrays: Arrays, path: Path) -> mx.array:
    stem = name.removesuffix(".weight")
    found = [name for part in SCALES if (name := f"{stem}.{part}") in arrays]
    if not found:
        return value
    scale, rows = arrays[found[0]], value.shape[0] if value.ndim else 1
    # One factor, or one per row.
    allowed = {(), (1,), (1, 1), (rows,), (rows, 1)}
    if tuple(scale.shape) not in allowed or not mx.issubdtype(scale.dtype, mx.floating):
        raise ValueError(f"{path}: {found[0]} must be one number or one for each of {rows} rows, got {tuple(scale.shape)}")
    product: mx.array = value * scale.astype(mx.float32).reshape(-1, *[1] * (value.ndim - 1))
    return product


def _dequantized(stem: str, arrays: Arrays, config: Mapping[str, Any], path: Path) -> mx.array:
    parts = [f"{stem}.{part}" for part in ("weight", *MLX_PARTS)]
    if missing := [part for part in parts if part not in arrays]:
        raise ValueError(f"{path} lacks {missing[0]}, which a layer quantised by MLX has")
    packed, scales, biases = (arrays[part] for part in parts)
    group, bits = _settings(stem, config, path)
    words, groups = packed.shape[-1], scales.shape[-1]
    bits = bits or 32 * words // max(1, groups * group)
    sound = scales.shape == biases.shape and packed.shape[:-1] == scales.shape[:-1] and packed.ndim == 2
    if not sound or bits not in BITS or 32 * words != groups * group * bits:
        raise ValueError(
            f"{path}: {stem} must be quantised by MLX in groups of {group}, got weight {tuple(packed.shape)}, "
            f"scales {tuple(scales.shape)} and biases {tuple(biases.shape)}"
        )
    return mx.dequantize(packed, scales, biases, group_size=group, bits=bits)


def _settings(stem: str, config: Mapping[str, Any], path: Path) -> tuple[int, int]:
    """(group size, bits) of a layer; 0 bits if config.json does not state them."""
    found = config.get("quantization", {})
    # Settings of one layer go before those of the model.
    own = found.get(stem) if isinstance(found, Mapping) else None
    settings = own if isinstance(own, Mapping) else found
    if not isinstance(settings, Mapping) or settings.get("mode", "affine") != "affine":
        raise ValueError(f"{path}: quantization in config.json must be MLX's affine one, got {settings!r:.80}")
    group, bits = settings.get("group_size", GROUP), settings.get("bits", 0)
    if group not in GROUPS or bits not in (0, *BITS):
        raise ValueError(f"{path}: quantization must have group_size in {GROUPS} and bits in {BITS}, got {group!r} and {bits!r}")
    return group, bits
