"""Read a T5 encoder with its projection head from a folder, strictly.

The folder is one of transformers, with config.json and safetensors files. The head is beside it, as sentence-transformers and
PyLate write it: 1_Dense or 2_Dense, with model.safetensors or pytorch_model.bin. Weights of a decoder are left out. A matrix may
be stored in 8 bits: int8 under its own name, and beside it "<name>_scale" with one factor per row.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models.folders import read_config
from stages.models.t5.config import EMBEDDING, HEAD, T5Config
from stages.models.t5.encoder import T5
from stages.models.t5.torch_file import read_torch_file
from stages.models.weights import Arrays, check_shapes, read_header, weight_files

DENSE = ("1_Dense", "2_Dense")  # folders of the head; PyLate writes the first, Google's XTR the second
SCALE = "_scale"  # ending of the scales of a matrix that is stored in 8 bits
TIED = "encoder.embed_tokens.weight"  # another name of the embedding
DTYPES = ("BF16", "F16", "F32", "I8")


def read_sizes(folder: Path, dimensions: int = 128) -> T5Config:
    """`dimensions`: of a folder without a head. Raises ValueError if config.json is missing or is that of another model."""
    config = read_config(folder)
    if not config:
        raise ValueError(f"{folder} has no config.json: a T5 encoder in the layout of transformers is needed")
    head = find_head(folder)
    return T5Config.from_dict(config, _head_shape(head)[0] if head else dimensions)


def load_encoder(folder: Path, dtype: mx.Dtype | None = None, head_seed: int | None = None, dimensions: int = 128) -> T5:
    """`dtype` None is float32. A missing head is drawn from `head_seed` (ValueError without), with `dimensions` outputs."""
    config = read_sizes(folder, dimensions)
    return T5(config, load_weights(folder, config, dtype or mx.float32, head_seed))


def load_weights(folder: Path, config: T5Config, dtype: mx.Dtype = mx.float32, head_seed: int | None = None) -> Arrays:
    """Weights by name, checked against `config`. A missing head is drawn from `head_seed`; without a seed it is a ValueError."""
    arrays = {_rename(key): value for key, value in _read_encoder(folder).items() if not _is_decoder(key)}
    check_shapes(arrays, config.encoder_shapes(), folder)
    arrays[HEAD] = _load_head(folder, config, head_seed)
    done: Arrays = {}
    for name in config.shapes():
        done[name] = arrays.pop(name).astype(dtype)
        mx.eval(done[name])
    return done


def find_head(folder: Path) -> Path | None:
    files = (folder / dense / name for dense in DENSE for name in ("model.safetensors", "pytorch_model.bin"))
    return next((file for file in files if file.is_file()), None)


def _head_shape(file: Path) -> tuple[int, int]:
    shape = tuple(_read_head(file).shape)
    if len(shape) != 2:
        raise ValueError(f"linear.weight in {file} must be a matrix (outputs, inputs), got shape {shape}")
    return shape[0], shape[1]


def _read_head(file: Path) -> mx.array:
    arrays = _read([file]) if file.suffix == ".safetensors" else read_torch_file(file)
    if set(arrays) != {"linear.weight"}:
        raise ValueError(f"{file} must hold linear.weight and nothing else, got {', '.join(sorted(arrays))}")
    return arrays["linear.weight"]


def _load_head(folder: Path, config: T5Config, seed: int | None) -> mx.array:
    file, shape = find_head(folder), (config.dimensions, config.d_model)
    if file:
        check_shapes({HEAD: (weight := _read_head(file))}, {HEAD: shape}, file)
        dense = read_config(file.parent)
        activation = str(dense.get("activation_function", "torch.nn.modules.linear.Identity"))
        if dense.get("bias") or not activation.endswith("Identity"):
            raise ValueError(f"the head in {file.parent} must have no bias and no activation: see its config.json")
        return weight
    if seed is None:
        raise ValueError(f"{folder} has no projection head: looked for {' and '.join(f'{dense}/' for dense in DENSE)}")
    # PyTorch's default for a Linear.
    bound = config.d_model**-0.5
    drawn = np.random.Generator(np.random.Philox(key=seed)).uniform(-bound, bound, shape)
    return mx.array(drawn.astype(np.float32))


def _read_encoder(folder: Path) -> Arrays:
    plain = folder / "pytorch_model.bin"
    if plain.is_file() and not any(folder.glob("*.safetensors")):
        arrays = read_torch_file(plain)
        if EMBEDDING in arrays:
            arrays.pop(TIED, None)
        return arrays
    return _read(weight_files(folder))


def _rename(key: str) -> str:
    return EMBEDDING if key == TIED else key


def _is_decoder(key: str) -> bool:
    return key.startswith("decoder.") or key == "lm_head.weight"


def _read(files: list[Path]) -> Arrays:
    """Matrices in 8 bits become float32. Raises ValueError if a name is in two files or a dtype is not supported."""
    stored: Arrays = {}
    for file in files:
        for key, tensor in read_header(file).items():
            if key in stored:
                raise ValueError(f"{key} is in more than one file of {file.parent}: remove the copies")
            if str(tensor.get("dtype")) not in DTYPES:
                raise ValueError(f"{file}: {key} is {tensor.get('dtype')}, which is not supported; fetch float weights instead")
        loaded: Any = mx.load(str(file))
        stored.update(loaded)
    if TIED in stored and EMBEDDING in stored:
        stored.pop(TIED)
    return {key: _unpacked(key, value, stored, files[0].parent) for key, value in stored.items() if not key.endswith(SCALE)}


def _unpacked(key: str, value: mx.array, stored: Mapping[str, mx.array], where: Path) -> mx.array:
    scale = stored.get(key + SCALE)
    if (scale is None) == (value.dtype == mx.int8):
        raise ValueError(f"{where}: {key} is stored in 8 bits only with {key}{SCALE} beside it, one factor per row")
    if scale is None:
        return value
    if scale.size != value.shape[0]:
        raise ValueError(f"{where}: {key}{SCALE} must have one factor for each of {value.shape[0]} rows, got {scale.size}")
    return value.astype(mx.float32) * scale.astype(mx.float32).reshape(-1, 1)
