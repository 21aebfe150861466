"""The base with a trained adapter merged into it: a transformer of its own in the diffusers layout."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from pipeline.store.disk import TEMPORARY, make_folder, sync
from stages.models import weights
from stages.models.family import Family
from stages.models.flux2 import key_maps as convert
from stages.models.flux2.adapter_formats import of_linear, read_adapter
from stages.models.flux2.transformer import Flux2Config
from stages.models.folders import component_config
from stages.tuner.adapters import merge

CLASS, STEM = "Flux2Transformer2DModel", "diffusion_pytorch_model"  # diffusers' words
SHARD = 4 << 30  # bytes of one file, which is what is held at once


def write_merged(base: Path, family: Family, adapter: Path, out: Path, *, dtype: str) -> Path:
    """The transformer at `base`, either layout, with the adapter in its weights, as the new folder `out`.

    Merged in float32 and rounded once, to `dtype`. The folder is there whole or not at all. ValueError if it exists, or if the
    adapter is of another model.
    """
    if out.exists():
        raise ValueError(f"{out} exists; move it away or give another name")
    config = {"_class_name": CLASS, **component_config(base, family.transformer)}
    shapes = Flux2Config.from_dict(config).shapes()
    arrays, scales = read_adapter(adapter)
    merge.check(shapes, arrays, scales)
    with whole_folder(out) as folder:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        shards = Shards(folder)

        def each(key: str, weight: mx.array) -> mx.array:
            name = key.removesuffix(".weight")
            if name in scales:
                weight = merge.merge(weight.astype(mx.float32), of_linear(arrays, name), scales[name])
            shards.add(key, weight.astype(getattr(mx, dtype)))
            return mx.zeros(0)  # what is written is let go

        foreign = convert.is_single_file(weights.read_keys(base))
        weights.load_component(
            base, shapes, convert=(lambda found: convert.transformer(found, base)) if foreign else None, arrange=each
        )
        shards.close()
    return out


class Shards:
    """Tensors gathered into files, named as diffusers names them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held: dict[str, mx.array] = {}
        self.written: list[dict[str, int]] = []  # of each file: bytes by key

    def add(self, key: str, value: mx.array) -> None:
        """Gather one more; written once there is enough for a file."""
        if self.held and sum(each.nbytes for each in self.held.values()) + value.nbytes > SHARD:
            self.flush()
        mx.eval(value)
        self.held[key] = value

    def flush(self) -> None:
        """Write what is gathered."""
        mx.save_safetensors(str(self.folder / f"{len(self.written)}.safetensors"), self.held, {"format": "pt"})
        self.written.append({key: value.nbytes for key, value in self.held.items()})
        self.held = {}

    def close(self) -> None:
        """Write the rest, name the files, and where there are several, say which holds what."""
        self.flush()
        count = len(self.written)
        several = [f"{STEM}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        names = several if count > 1 else [f"{STEM}.safetensors"]
        for n, name in enumerate(names):
            (self.folder / f"{n}.safetensors").rename(self.folder / name)
        if count > 1:
            where = {key: name for name, keys in zip(names, self.written, strict=True) for key in keys}
            size = sum(sum(keys.values()) for keys in self.written)
            index: Mapping[str, Any] = {"metadata": {"total_size": size}, "weight_map": where}
            (self.folder / f"{STEM}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`, which becomes `path` when the block ends well and vanishes otherwise."""
    make_folder(path.parent)
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(4)}-{path.name}")
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        temporary.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
