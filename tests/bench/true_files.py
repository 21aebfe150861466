"""Write files of random weights with the shapes of a released model: in the diffusers layout, in shards, or as the makers' single
files.

All matrices of equal width repeat one block of normal values, so writing is limited only by the disk.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import mlx.core as mx
import numpy as np

from stages.models.family import TOKENIZER, Family
from tests import checkpoints
from tests.bench.encoders import autoencoder_module

SHARD = 5_000_000_000  # bytes of a file
BLOCK = 16_777_213  # values that repeat; a prime, so that the rows of a matrix differ
AT_ONCE = 8  # shards that are written at the same time
SIZES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}

PREFIXES = {"mistral3": "language_model.model.", "qwen3_vl": "model.language_model."}  # of a text encoder's names, by `text_kind`

Shapes = dict[str, tuple[int, ...]]


class Entry(NamedTuple):
    """dtype as safetensors spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * SIZES[self.dtype]


@functools.cache
def normal_values() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(BLOCK, np.float32)


@functools.lru_cache(maxsize=8)
def repeated(dtype: str, inputs: int) -> np.ndarray:
    """`BLOCK` random values, deviation 1 / sqrt(inputs); of fp8 64 times as large, because a scale of 1/64 belongs to them."""
    values = normal_values() * np.float32(inputs**-0.5)
    with mx.stream(mx.cpu):
        made = mx.to_fp8(mx.array(64 * values)) if dtype == "F8_E4M3" else mx.array(values).astype(mx.bfloat16).view(mx.uint16)
        return np.array(made)


def entries(shapes: Shapes, fp8: bool) -> Iterator[Entry]:
    """With `fp8`, matrices are in fp8, and each has a scale."""
    for name, shape in shapes.items():
        packed = fp8 and len(shape) == 2 and name.endswith(".weight")
        yield Entry(name, "F8_E4M3" if packed else "BF16", shape)
        if packed:
            yield Entry(name.replace(".weight", ".weight_scale"), "F32", ())


def write_values(entry: Entry, out: BinaryIO) -> None:
    """Norms of ones, biases and means of zeros, matrices of random values."""
    if entry.dtype == "F32":
        out.write(np.float32(1 / 64).tobytes())
        return
    count = math.prod(entry.shape)
    if len(entry.shape) < 2:
        one = 0 if "bias" in entry.name or "mean" in entry.name else 0x3F80
        out.write(np.full(count, one, np.uint16).tobytes())
        return
    block = repeated(entry.dtype, math.prod(entry.shape[1:]))
    for start in range(0, count, BLOCK):
        out.write(block[: count - start].data)


def write_shard(file: Path, shard: list[Entry]) -> None:
    header, at = {}, 0
    for entry in shard:
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [at, at + entry.size]}
        at += entry.size
    head = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for entry in shard:
            write_values(entry, out)


def write_component(folder: Path, stem: str, shapes: Shapes, config: dict[str, Any], fp8: bool = False) -> None:
    """config.json, shards of at most SHARD bytes, and their index; `stem` begins the names of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[list[Entry]] = [[]]
    for entry in entries(shapes, fp8):
        if sum(each.size for each in shards[-1]) + entry.size > SHARD and not entry.name.endswith("_scale"):
            shards.append([])
        shards[-1].append(entry)
    files = [folder / f"{stem}-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    normal_values()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(write_shard, files, shards))
    places = {entry.name: file.name for file, shard in zip(files, shards, strict=True) for entry in shard}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def component_shapes(record: Family, component: str) -> Shapes:
    """Without layers of the text encoder that are never read."""
    if component == "transformer":
        return dict(record.architecture.transformer_config(None, record).shapes())
    if component == "autoencoder":
        return dict(autoencoder_module(record).AutoencoderConfig.from_dict(record.autoencoder).shapes())
    needed = record.architecture.text_encoder_sizes(None, record).shapes(max(record.text_layers))
    prefix = PREFIXES.get(record.text_kind, "model.")
    return {prefix + name: shape for name, shape in needed.items()}


def single_file_shapes(record: Family, component: str) -> Shapes:
    import torch

    shapes = component_shapes(record, component)
    names: Any = {"transformer": checkpoints.SINGLE_FILES[record.code], "autoencoder": checkpoints.autoencoder_as_single_file}
    without_memory = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return {name: tuple(value.shape) for name, value in names.get(component, dict)(without_memory).items()}


def bytes_of(record: Family, component: str, fp8: bool = False) -> int:
    """Roughly."""
    return sum(entry.size for entry in entries(component_shapes(record, component), fp8))


def path_of(record: Family, folder: Path, component: str, single: bool = False) -> Path:
    return folder / (record.single_files[component][0] if single else record.folders[component])


def write(record: Family, folder: Path, component: str, fp8: bool = False, single: bool = False) -> None:
    """At its released sizes. The text encoder comes with a small tokenizer. `single`: the makers' single file."""
    from stages.models.random_model import write_tokenizer

    path, fp8 = path_of(record, folder, component, single), fp8 and component != "autoencoder"
    if component == "text_encoder":
        tokenizer = folder / (TOKENIZER if single else record.folders[TOKENIZER])
        if record.text_kind == "mistral3":
            checkpoints.mistral_tokenizer().save_pretrained(tokenizer)
        else:
            write_tokenizer(tokenizer, 1024)
    if single:
        write_shard(path, list(entries(single_file_shapes(record, component), fp8)))
        return
    config = dict(getattr(record, component))
    if record.text_kind == "qwen3_vl" and component == "text_encoder":
        config = {"model_type": "qwen3_vl", "text_config": config}
    stem = "model" if component == "text_encoder" else "diffusion_pytorch_model"
    write_component(path, stem, component_shapes(record, component), config, fp8)
