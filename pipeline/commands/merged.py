"""Writes a transformer with a trained adapter merged into its weights, as a folder in the diffusers layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from pipeline.store.disk import atomic_folder, delete_abandoned
from stages.models.adapters import of_linear
from stages.models.family import Family
from stages.models.folders import component_config
from stages.tuner.adapters import merge

STEM = "diffusion_pytorch_model"  # of the weight files' names, as diffusers expects them
SHARD = 4 << 30  # the largest size of a weight file, bytes; as much is held in memory


def write_merged(base: Path, family: Family, adapter: Path, out: Path, *, dtype: str) -> Path:
    """Merge in float32, round once to `dtype`, and write the new folder `out`, completely or not at all.

    Raises ValueError if `out` exists, the adapter belongs to another model, or weights are missing.
    """
    if out.exists():
        raise ValueError(f"{out} exists; move it away or choose another name")
    architecture = family.architecture
    config = {"_class_name": architecture.transformer_class, **component_config(base, family.transformer)}
    arrays, scales = architecture.read_adapter(adapter)
    merge.check_shapes(architecture.transformer_config(base, family).shapes(), arrays, scales)
    delete_abandoned(out.parent)
    with atomic_folder(out) as folder:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        shards = ShardWriter(folder)

        def write(key: str, weight: mx.array) -> mx.array:
            name = key.removesuffix(".weight")
            if name in scales:
                weight = merge.merge(weight.astype(mx.float32), of_linear(arrays, name), scales[name])
            shards.add(key, weight.astype(getattr(mx, dtype)))
            return mx.zeros(0)  # frees the weight

        # `arrange` sees one weight at a time, so that the transformer is never in memory as a whole.
        architecture.load_transformer(base, family, arrange=write)
        shards.close()
    return out


class ShardWriter:
    """Puts tensors into safetensors files of at most `SHARD` bytes, named and indexed as diffusers expects."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pending: dict[str, mx.array] = {}
        self.written: list[dict[str, int]] = []  # for each file, bytes by key

    def add(self, key: str, value: mx.array) -> None:
        if self.pending and sum(each.nbytes for each in self.pending.values()) + value.nbytes > SHARD:
            self._write_pending()
        # One at a time: saving would compute all pending weights at once.
        mx.eval(value)
        self.pending[key] = value

    def close(self) -> None:
        self._write_pending()
        count = len(self.written)
        # A name contains the number of files, which is known only now.
        several = [f"{STEM}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        names = several if count > 1 else [f"{STEM}.safetensors"]
        for n, name in enumerate(names):
            (self.folder / f"{n}.safetensors").rename(self.folder / name)
        if count > 1:
            self._write_index(names)

    def _write_pending(self) -> None:
        mx.save_safetensors(str(self.folder / f"{len(self.written)}.safetensors"), self.pending, {"format": "pt"})
        self.written.append({key: value.nbytes for key, value in self.pending.items()})
        self.pending = {}

    def _write_index(self, names: list[str]) -> None:
        files = {key: name for name, keys in zip(names, self.written, strict=True) for key in keys}
        size = sum(sum(keys.values()) for keys in self.written)
        index: Mapping[str, Any] = {"metadata": {"total_size": size}, "weight_map": files}
        (self.folder / f"{STEM}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
