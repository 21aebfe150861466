"""The frozen model of a run, and the adapter that [train] initial starts from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from stages.models.family import Family, Transformer
from stages.text_to_image import converted
from stages.text_to_image.packing import load_packed
from stages.text_to_image.train.config import TrainConfig
from stages.tuner.adapters.initial import check_initial
from stages.tuner.checkpoint import adapter_damage
from stages.tuner.step import choose_targets
from stages.tuner.task import InitialAdapter


def load_transformer(
    path: Path,
    family: Family,
    config: TrainConfig,
    folder: Path | None = None,
    copies: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Transformer:
    """The frozen transformer, its weights packed as [train] says.

    `folder`: takes the weights of the blocks with stream_blocks. `copies`: folder of converted copies; a copy that is there
    is read
    instead of `path`, else one is written and `say` reports it. Unused with stream_blocks.
    """
    dtype = getattr(mx, config.precision)
    if copies is not None and not config.stream_blocks:
        return converted.load_transformer(family, path, dtype, config, copies, say)
    return load_packed(path, family, dtype, config, folder)


def read_initial_adapter(file: Path, weights: Path, family: Family, config: TrainConfig) -> InitialAdapter:
    """(float32 arrays by "<linear><ending>", scale by Linear). Raises ValueError if the file is damaged or does not fit
    model or [train].
    """
    if damage := adapter_damage(file):
        raise ValueError(f"[train] initial: {file} {damage}; run `latentmill verify --repair` in its project")
    architecture = family.architecture
    # Only the sizes of the transformer are read.
    meta = architecture.meta_transformer(architecture.transformer_config(weights, family), mx.float32)
    targets = choose_targets(meta.linears(), config)
    try:
        arrays, scales = architecture.read_adapter(file)
        check_initial(arrays, scales, targets)
    except ValueError as error:
        raise ValueError(f"[train] initial: {error}") from None
    return arrays, scales
