"""The functions of T5 retrievers, for the record of their family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from stages.models.t5.config import T5Config
from stages.models.t5.encoder import T5
from stages.models.t5.layout import write_model
from stages.models.t5.load import load_encoder, load_weights, read_sizes
from stages.models.t5.random_weights import write_random_weights


@dataclass(frozen=True)
class RetrieverArchitecture:
    """Reached through `family.architecture`. `path` is the folder of the weights; reading raises ValueError with one line."""

    # sizes(path): the sizes of the encoder and its head.
    sizes: Callable[[Path], T5Config]
    # load_encoder(path, dtype, head_seed): the encoder with its head; a missing head is drawn from the seed, if there is one.
    load_encoder: Callable[..., T5]
    # load_weights(path, sizes, dtype, head_seed): its weights by name.
    load_weights: Callable[..., dict[str, mx.array]]
    # meta_encoder(sizes, dtype): every name and shape, of arrays that are never computed and take no memory.
    meta_encoder: Callable[[T5Config, mx.Dtype], T5]
    # build_encoder(sizes, weights): an encoder of these weights, by the names of sizes.shapes(), arrays or packed.
    build_encoder: Callable[[T5Config, Mapping[str, Any]], T5]
    # write_model(folder, sizes, weights, settings): a folder that transformers and sentence-transformers load.
    write_model: Callable[..., None]
    # write_random_weights(folder, family, seed): a complete model of the family's sizes.
    write_random_weights: Callable[[Path, Any, int], None]


def meta_encoder(config: T5Config, dtype: mx.Dtype) -> T5:
    """For estimates of memory: weights are lazy zeros."""
    return T5(config, {name: mx.zeros(shape, dtype) for name, shape in config.shapes().items()})


T5_RETRIEVER = RetrieverArchitecture(read_sizes, load_encoder, load_weights, meta_encoder, T5, write_model, write_random_weights)
