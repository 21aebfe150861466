"""The frozen model of a run, and the adapter that [train] initial starts from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from stages.models.family import Family
from stages.models.protocols import Transformer
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
    """Return the transformer of `family`, read from the folder `path`. Its weights are packed (quantised) as the
    settings [train] `config` say. `folder` is needed if the setting `stream_blocks` is on. The weights of the blocks
    (layers) then stay in files there. `copies` is a folder for a copy of the packed weights. If it is None, no copy is
    written. `say(line)` receives messages about the copy.

    If `stream_blocks` is on, `copies` is not used. Otherwise, a copy that is already in `copies` is read instead of
    `path`. By default, `say` does nothing.
    """
    dtype = getattr(mx, config.precision)
    if copies is not None and not config.stream_blocks:
        return converted.load_transformer(family, path, dtype, config, copies, say)
    return load_packed(path, family, dtype, config, folder)


def read_initial_adapter(file: Path, weights: Path, family: Family, config: TrainConfig) -> InitialAdapter:
    """Read the adapter file that a training run starts from. Return (arrays, scales), both dicts. `arrays` maps
    "<linear><ending>" to a float32 array. `scales` maps the name of a linear layer to its scale. `file` is the adapter.
    `weights` is the folder of the transformer, from which only its sizes are read. `family` is the model family.
    `config` holds the settings [train]. Raises ValueError if the adapter is damaged or does not fit the model or the
    settings.
    """
    if damage := adapter_damage(file):
        raise ValueError(f"[train] initial: {file} {damage}; run `latentmill verify --repair` in its project")
    architecture = family.architecture
    meta = architecture.meta_transformer(architecture.transformer_config(weights, family), mx.float32)
    targets = choose_targets(meta.linears(), config)
    try:
        arrays, scales = architecture.read_adapter(file)
        check_initial(arrays, scales, targets)
    except ValueError as error:
        raise ValueError(f"[train] initial: {error}") from None
    return arrays, scales
