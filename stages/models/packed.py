"""Unpack weights that other tools have stored in 8 bits or fewer: fp8 with or without scales, and MLX's quantised layers.

Nothing is computed here: a tensor is read and unpacked when it is first evaluated.
"""

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
    """Return True if some tensors are stored in 8 bits or quantised. `dtypes` maps names to dtypes as safetensors
    spells them.
    """
    return any(dtype in FP8 or (dtype == "U32" and name.endswith(".weight")) for name, dtype in dtypes.items()) or any(
        OTHER.search(name) or name.endswith(SCALES) for name in dtypes
    )


def unpack(arrays: Arrays, dtypes: Mapping[str, str], config: Mapping[str, Any], path: Path) -> Arrays:
    """Return the tensors of a component, with quantised ones unpacked to floating-point numbers. Scales are left out.
    `arrays` maps names to arrays; fp8 ones are uint8. `dtypes` maps names to dtypes as safetensors spells them.
    `config` is the content of config.json, which states the bits and group size of layers that MLX has quantised.
    `path` is the component's path, for messages. Raises ValueError if a quantisation is not supported or a scale has a
    wrong shape.
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
    """Return fp8 numbers as a float32 array. `value` is a uint8 array with their bytes. `dtype` is the kind of fp8,
    "F8_E4M3" or "F8_E5M2".

    The five-bit exponent of e5m2 is that of float16.
    """
    if dtype == "F8_E4M3":
        return mx.from_fp8(value, mx.float32)
    return mx.left_shift(value.astype(mx.uint16), mx.array(8, mx.uint16)).view(mx.float16).astype(mx.float32)


def _scaled(name: str, value: mx.array, arrays: Arrays, path: Path) -> mx.array:
    """Return a weight multiplied by its scale. `name` is the weight's name. `value` is the float32 weight without its
    scale. `arrays` maps names to all tensors of the component, among them the scale. A scale is one number, or one for
    each row of the weight. Without a scale, `value` is returned unchanged. `path` is the component's path, for
    messages. Raises ValueError if the scale has another shape or dtype.
    """
    stem = name.removesuffix(".weight")
    found = [name for part in SCALES if (name := f"{stem}.{part}") in arrays]
    if not found:
        return value
    scale, rows = arrays[found[0]], value.shape[0] if value.ndim else 1
    allowed = {(), (1,), (1, 1), (rows,), (rows, 1)}
    if tuple(scale.shape) not in allowed or not mx.issubdtype(scale.dtype, mx.floating):
        raise ValueError(f"{path}: {found[0]} must be one number or one for each of {rows} rows, got {tuple(scale.shape)}")
    product: mx.array = value * scale.astype(mx.float32).reshape(-1, *[1] * (value.ndim - 1))
    return product


def _dequantized(stem: str, arrays: Arrays, config: Mapping[str, Any], path: Path) -> mx.array:
    """Return the unpacked weight of a layer that MLX has quantised. `stem` is the layer's name. `arrays` maps names to
    the component's arrays. `config` is the content of its config.json, with the settings of the quantisation. `path` is
    the component's path, for messages. Raises ValueError if an array of the layer is missing, or if the shapes
    contradict each other or `config`.
    """
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
    """Return (group size, bits) of a layer that MLX has quantised. `stem` is the layer's name. `config` is the content
    of config.json. If it does not state the group size, the group size is `GROUP`. If it does not state the bits, they
    are 0. `path` is the component's path, for messages. Raises ValueError if a setting is not supported.
    """
    found = config.get("quantization", {})
    own = found.get(stem) if isinstance(found, Mapping) else None
    settings = own if isinstance(own, Mapping) else found
    if not isinstance(settings, Mapping) or settings.get("mode", "affine") != "affine":
        raise ValueError(f"{path}: quantization in config.json must be MLX's affine one, got {settings!r:.80}")
    group, bits = settings.get("group_size", GROUP), settings.get("bits", 0)
    if group not in GROUPS or bits not in (0, *BITS):
        raise ValueError(f"{path}: quantization must have group_size in {GROUPS} and bits in {BITS}, got {group!r} and {bits!r}")
    return group, bits
