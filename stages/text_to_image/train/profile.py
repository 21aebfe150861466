"""Training steps on random weights in a family's true shape, to measure time and memory. Nothing is read from disk.

The step is the one that training takes (`stages.tuner.step`); memory and time depend on shapes alone.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import gettempdir
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models.family import Family
from stages.models.protocols import Transformer
from stages.text_to_image.packing import STREAMED, arranged
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.train.dataset import Crop
from stages.text_to_image.train.memory_plan import BatchShape
from stages.text_to_image.train.objective import FlowMatching
from stages.text_to_image.train.reader import MicroBatch
from stages.text_to_image.train.sampler import Sample
from stages.tuner.blockwise.device import compiles
from stages.tuner.config import OptimizerConfig
from stages.tuner.optimizers.methods import make_optimizer
from stages.tuner.step import TrainingStep, choose_targets, starting_adapter
from stages.tuner.stored import WeightFolder


def profile_settings(method: Any = "adamw", **others: Any) -> TrainConfig:
    """Return [train] settings for measuring the time and memory of training. `method` is the kind of the optimizer,
    such as "adamw". The learning rate is the usual one of this optimizer. The precision is "float32" on a CPU and
    "bfloat16" elsewhere. Further keyword arguments, `**others`, set [train] settings by name, such as `base_bits=4`.
    They can also replace the optimizer, the learning rate (`lr`) and the precision. All other settings have their
    defaults.
    """
    precision = "bfloat16" if compiles() else "float32"
    usual: Any = {"optimizer": OptimizerConfig(kind=method), "lr": make_optimizer(method).usual_lr, "precision": precision}
    return TrainConfig(**(usual | others))


def random_transformer(family: Family, config: TrainConfig) -> Transformer:
    """Build a transformer with random weights. The shapes of the weights are those of the model family `family`. Each
    weight is quantised if `config`, the settings of training, says so. With `config.stream_blocks`, the weights of the
    blocks lie in files in the system's temporary folder. The files are deleted together with the transformer.
    """
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


def random_training(family: Family, config: TrainConfig) -> TrainingStep:
    """Build a training step for a transformer with random weights. `family` gives the shapes of the weights. `config`
    holds the settings [train]. All blocks keep their activations until the backward pass (plan "whole"). The memory has
    no limit. To use less memory, set the attributes `plan` and `live_bytes` of the result.
    """
    model = random_transformer(family, config)
    targets = choose_targets(model.linears(), config)
    objective = FlowMatching(family.architecture, config.loss, config.preservation)
    return TrainingStep(model, objective, targets, config, starting_adapter(model, targets, config))


def random_batch(family: Family, batch: BatchShape) -> MicroBatch:
    """Return a micro-batch of random latents, noise and embeddings for the transformer of `family`. `batch` gives its size. All
    samples have noise level 0.5.
    """
    sizes: Any = family.architecture.transformer_config(None, family)
    draw = np.random.default_rng(0)

    def words(*shape: int) -> np.ndarray:
        """Return random bfloat16 values for all samples of the batch, as a uint16 array with the bits of the values.
        The call takes any number of integers as positional arguments (`*shape`). They are the shape of the values of
        one sample. For example, `words(3, 4)` returns an array of shape `(8, 3, 4)` for a batch of 8 samples.

        The number of samples is `batch.samples` of the enclosing function `random_batch`. The values have the standard
        normal distribution and are truncated to bfloat16.
        """
        values = draw.standard_normal((batch.samples, *shape), dtype=np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    crop = Crop("", "", batch.width, batch.height, batch.grid, ("",))
    samples = [Sample(n, 0, crop, "", False, 0.5) for n in range(batch.samples)]
    latent = (sizes.in_channels, *batch.grid)
    noise_BCHW = draw.standard_normal((batch.samples, *latent), dtype=np.float32)
    return MicroBatch(samples, words(*latent), noise_BCHW, words(batch.text_rows, sizes.joint_attention_dim))
