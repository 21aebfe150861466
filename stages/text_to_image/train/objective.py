"""Flow matching, the objective of training: x_sigma = (1 - sigma) x0 + sigma noise; the model predicts noise - x0.

Letters in names: B batch, C latent channels, H W latent height and width, L = H W image tokens, T text rows, J text features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models.family import Architecture
from stages.models.protocols import Transformer
from stages.text_to_image.train.config import LossConfig, PreservationConfig
from stages.text_to_image.train.reader import MicroBatch
from stages.tuner.diffusion import loss, weighting
from stages.tuner.step import predict_base
from stages.tuner.task import Term

GUIDANCE = 1.0  # the guidance that models with embedded guidance are trained at, as all trainers but one do

Loss = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class FlowMatching:
    """The objective of flow matching. The model predicts a velocity, which is `noise - clean`. `loss` holds the
    settings [train.loss]. `preservation` holds the settings [train.preservation], or is None. They add a second loss
    that keeps the base model's predictions for class captions. `separable` is True if the loss of a sample does not
    depend on other samples. Only then may a batch be divided into micro-batches.
    """

    architecture: Architecture
    loss: LossConfig
    preservation: PreservationConfig | None = None
    separable: bool = True

    def terms(self, model: Transformer, batch: MicroBatch) -> Iterator[Term]:
        """Yield the loss of a micro-batch. If samples have class captions, then also yield the preservation loss. It measures how
        far the adapter changes the model's prediction for the class captions.
        """
        x_BLC, target_BLC = self.mix(batch)
        yield Term(self.inputs(batch, x_BLC, batch.ctx_BTJ), velocity_loss(batch, target_BLC, self.loss))
        if batch.class_BTJ is None or batch.class_B is None or self.preservation is None:
            return
        inputs = self.inputs(batch, x_BLC, batch.class_BTJ)
        weight_B = self.preservation.weight * mx.array(batch.class_B)
        preserved = functools.partial(loss.preservation, base_BLC=predict_base(model, inputs), weight_B=weight_B)
        yield Term(inputs, preserved, "preservation", [bool(one) for one in batch.class_B])

    def validation_term(self, model: Transformer, batch: MicroBatch) -> Term:
        """Return the loss for held-out samples: always the plain mean squared error. So runs with different [train.loss] settings
        can be compared.
        """
        x_BLC, target_BLC = self.mix(batch)
        return Term(self.inputs(batch, x_BLC, batch.ctx_BTJ), velocity_loss(batch, target_BLC, LossConfig()))

    def mix(self, batch: MicroBatch) -> tuple[mx.array, mx.array]:
        """Mix the clean latents of a micro-batch with noise. Returns (noisy latents, target velocity), two float32
        arrays of shape `(batch, tokens, channels)`. The noisy latents are `(1 - sigma) * clean + sigma * noise`. The
        target velocity is `noise - clean`.
        """
        tokens = self.architecture.tokens
        x0_BLC = tokens(mx.array(batch.x0_BCHW).view(mx.bfloat16)).astype(mx.float32)
        noise_BLC = tokens(mx.array(batch.noise_BCHW))
        sigma_B11 = sigmas(batch)[:, None, None]
        return (1 - sigma_B11) * x0_BLC + sigma_B11 * noise_BLC, noise_BLC - x0_BLC

    def inputs(self, batch: MicroBatch, x_BLC: mx.array, words_BTJ: np.ndarray) -> dict[str, Any]:
        """Return the model's inputs as keyword arguments. `x_BLC` are the noisy latents (batch, tokens, channels). `words_BTJ`
        are text embeddings (batch, text rows, features). They are bfloat16 stored as uint16 words.
        """
        height, width = batch.x0_BCHW.shape[2:]
        text_BTJ = mx.array(words_BTJ).view(mx.bfloat16)
        return self.architecture.inputs(x_BLC, (height, width), text_BTJ, sigmas(batch), GUIDANCE)


def sigmas(batch: MicroBatch) -> mx.array:
    """Return the noise level (sigma, 0 clean to 1 noise) of each sample, as a float32 array."""
    return mx.array([s.sigma for s in batch.samples], mx.float32)


def velocity_loss(batch: MicroBatch, target_BLC: mx.array, config: LossConfig) -> Loss:
    """Return the loss function of a micro-batch. The function maps the predicted velocity to one loss per sample.
    `target_BLC` is the true velocity, `noise - clean`, shape `(batch, tokens, channels)`. `config` holds the settings
    [train.loss]. They choose the kind of loss and its weight at each noise level. If the micro-batch has a mask, it
    weights the image tokens.

    The arrays are keywords of a partial, so that MLX can compile the function with the model's last blocks.
    """
    arrays = {"target_BLC": target_BLC}
    if config.weight != "none":
        sigma_B = np.array([s.sigma for s in batch.samples])
        arrays["weight_B"] = mx.array(weighting.weight(config.weight, sigma_B).astype(np.float32))
    if batch.mask_BL is not None:
        arrays["mask_BL"] = mx.array(batch.mask_BL)
    if config.kind == "pseudo_huber":
        return functools.partial(loss.pseudo_huber, c=mx.array(config.huber_c, mx.float32), **arrays)
    return functools.partial(loss.mse, **arrays)
