"""Training steps on random weights in a family's true shape, to measure time and memory; both depend on shapes alone."""

from __future__ import annotations

from pathlib import Path
from tempfile import gettempdir
from typing import Any

import mlx.core as mx
import numpy as np

from stages.kernels import compiles
from stages.models.family import Family, Transformer
from stages.text_to_image.train.batches import MicroBatch, Sample
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.train.data import Crop, Reference
from stages.text_to_image.train.memory import BatchShape
from stages.text_to_image.train.task import FlowMatching
from stages.text_to_image.weights import STREAMED, arranged
from stages.tuner.config import OptimizerConfig
from stages.tuner.memory import MemoryPlan
from stages.tuner.optimizers import make_optimizer
from stages.tuner.step import TrainingStep, choose_targets, starting_adapter
from stages.tuner.weights import WeightFolder


def profile_settings(method: Any = "adamw", **others: Any) -> TrainConfig:
    """[train] settings to measure with: the usual lr of the optimizer `method`, and float32 on a CPU. `others` override."""
    precision = "bfloat16" if compiles() else "float32"
    usual: Any = {"optimizer": OptimizerConfig(kind=method), "lr": make_optimizer(method).usual_lr, "precision": precision}
    return TrainConfig(**(usual | others))


def random_transformer(family: Family, config: TrainConfig) -> Transformer:
    """With stream_blocks, the blocks' weights are in files in the system's temporary folder, deleted together with the model."""
    architecture = family.architecture
    sizes = architecture.transformer_config(None, family)
    dtype, stored = getattr(mx, config.precision), WeightFolder(Path(gettempdir(), STREAMED)) if config.stream_blocks else None
    arrange = arranged(architecture, config, stored)
    weights: dict[str, Any] = {}
    for number, (name, shape) in enumerate(sizes.shapes().items()):
        value = mx.random.normal(shape, dtype, key=mx.random.key(number)) * shape[-1] ** -0.5
        weights[name] = arrange(name, value) if arrange else value
        mx.eval(weights[name])
    model = architecture.build_transformer(sizes, weights)
    if stored:
        stored.belongs_to(model)
    return model


def random_training(family: Family, config: TrainConfig, memory: MemoryPlan | None = None) -> TrainingStep:
    """`memory`: None computes no block twice and has no limit."""
    model = random_transformer(family, config)
    targets = choose_targets(model.linears(), config)
    objective = FlowMatching(family.architecture, config.loss, config.preservation, masks=config.masks)
    return TrainingStep(model, objective, targets, config, starting_adapter(model, targets, config), memory=memory)


def random_batch(family: Family, batch: BatchShape) -> MicroBatch:
    """Random latents, noise and embeddings; every noise level is 0.5."""
    sizes: Any = family.architecture.transformer_config(None, family)
    draw = np.random.default_rng(0)

    def words(*shape: int) -> np.ndarray:
        values = draw.standard_normal((batch.samples, *shape), dtype=np.float32)
        # The upper half of a float32 is a bfloat16.
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    shown = tuple(Reference("", grid) for grid in batch.references)
    crop = Crop("", "", batch.width, batch.height, batch.grid, ("",), references=shown)
    samples = [Sample(n, 0, crop, "", False, 0.5) for n in range(batch.samples)]
    latent = (sizes.latent_channels, *batch.grid)
    noise_BCHW = draw.standard_normal((batch.samples, *latent), dtype=np.float32)
    found = MicroBatch(samples, words(*latent), noise_BCHW, words(batch.text_rows, sizes.text_features))
    found.references = tuple(words(sizes.latent_channels, *grid) for grid in batch.references)
    return found
