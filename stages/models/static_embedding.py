"""Static encoders in folders as model2vec writes them: the vector of a text is the mean of its tokens' rows in a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from stages.kernels import Arrays
from stages.models.family import Block, Reading, RetrieverArchitecture
from stages.models.folders import read_config
from stages.models.t5.model import EPS
from stages.models.weights import evaluate_each, read_header, read_tensors
from stages.untrusted import read_json

TABLE = "embeddings"
FACTORS, ROWS = "weights", "mapping"  # of a table that was cut down: by token id, its factor and its row


@dataclass(frozen=True)
class StaticConfig:
    vocab_size: int
    dimensions: int
    num_heads: int = 1  # what estimates of memory ask

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {TABLE: (self.vocab_size, self.dimensions)}


def is_model(folder: Path) -> bool:
    modules = read_json(folder / "modules.json") if (folder / "modules.json").is_file() else []
    first = modules[0] if isinstance(modules, list) and modules and isinstance(modules[0], dict) else {}
    return read_config(folder).get("model_type") == "model2vec" or str(first.get("type", "")).endswith(".StaticEmbedding")


def read_sizes(folder: Path) -> StaticConfig:
    """Raises ValueError if model.safetensors is missing or holds no table."""
    header = read_header(folder / "model.safetensors")
    shape = header.get(TABLE, {}).get("shape", ())
    if len(shape) != 2:
        raise ValueError(f"{folder / 'model.safetensors'} must hold the matrix {TABLE}: is it a model of model2vec?")
    rows = header[ROWS]["shape"][0] if ROWS in header else shape[0]
    return StaticConfig(rows, shape[1])


def load_weights(folder: Path, config: StaticConfig, dtype: mx.Dtype = mx.float32, head_seed: int | None = None) -> Arrays:
    stored = read_tensors(folder)
    table = stored[TABLE].astype(mx.float32)
    if ROWS in stored:
        rows = stored[ROWS].astype(mx.int32)
        if not 0 <= int(rows.min()) <= int(rows.max()) < table.shape[0]:
            raise ValueError(f"{ROWS} in {folder / 'model.safetensors'} must name rows of the {table.shape[0]} of {TABLE}")
        table = table[rows]
    if FACTORS in stored:
        if stored[FACTORS].shape != table.shape[:1]:
            raise ValueError(f"{FACTORS} in {folder / 'model.safetensors'} must have {table.shape[0]} values")
        table = table * stored[FACTORS].astype(mx.float32)[:, None]
    return evaluate_each({TABLE: table}, dtype)


def load_encoder(folder: Path, dtype: mx.Dtype | None = None, head_seed: int | None = None) -> StaticEncoder:
    config = read_sizes(folder)
    return StaticEncoder(config, load_weights(folder, config, dtype or mx.float32))


Shared = list[mx.array]  # per part: real_BL


class StaticEncoder:
    """As `stages.models.t5.model.T5`: `model(ids, real)` -> float32 (B, 1, E) per part, one vector of each text."""

    def __init__(self, config: StaticConfig, weights: Mapping[str, Any]) -> None:
        self.config, self.table = config, weights[TABLE]
        self.blocks = [Block("mean", "mean", {})]

    @property
    def dtype(self) -> mx.Dtype:
        found: mx.Dtype = self.table.dtype
        return found

    def linears(self) -> dict[str, tuple[int, int]]:
        return {}

    def enter(self, ids: Sequence[mx.array], real: Sequence[mx.array]) -> tuple[list[mx.array], Shared]:
        return [self.table[part_BL] for part_BL in ids], list(real)

    def block(self, kind: str) -> Callable[..., list[mx.array]]:
        def mean(weights: Any, h: list[mx.array], shared: Shared, linear: Any = None) -> list[mx.array]:
            sums = [(x_BLE * real_BL[:, :, None]).sum(1, keepdims=True) for x_BLE, real_BL in zip(h, shared, strict=True)]
            return [x_B1E / real_BL.sum(1)[:, None, None] for x_B1E, real_BL in zip(sums, shared, strict=True)]

        return mean

    def leave(self, h: list[mx.array], shared: Shared) -> list[mx.array]:
        wide = [x_B1E.astype(mx.float32) for x_B1E in h]
        return [x / mx.maximum(mx.sqrt((x * x).sum(-1, keepdims=True)), EPS) for x in wide]


def reading(folder: Path) -> Reading:
    return Reading(end=False, special=False, query_tokens=512, document_tokens=512)


def _refuse(*_: Any) -> None:
    raise ValueError("models of this family are read, not written")


STATIC_RETRIEVER = RetrieverArchitecture(
    read_sizes, load_encoder, load_weights, StaticEncoder, _refuse, _refuse, is_model, reading
)
