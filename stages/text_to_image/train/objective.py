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

from stages.models.family import Architecture, Transformer
from stages.text_to_image.train.config import LossConfig, PreservationConfig
from stages.text_to_image.train.reader import MicroBatch
from stages.tuner.blockwise.backprop import predict_base
from stages.tuner.diffusion import loss, weighting
from stages.tuner.task import Term

GUIDANCE = 1.0  # the guidance that models with embedded guidance are trained at, as all trainers but one do

Loss = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class FlowMatching:
    """The model learns the velocity, noise - clean; `preservation` adds a loss that keeps the base's predictions."""

    architecture: Architecture
    loss: LossConfig
    preservation: PreservationConfig | None = None
    separable: bool = True  # a sample's loss depends on that sample alone, so a batch may be divided into micro-batches

    def terms(self, model: Transformer, batch: MicroBatch) -> Iterator[Term]:
        """The loss of the velocity, then that of preservation if it is on and a sample has a class caption."""
        x_BLC, target_BLC = self.mix(batch)
        yield Term(self.inputs(batch, x_BLC, batch.ctx_BTJ), velocity_loss(batch, target_BLC, self.loss))
        if batch.class_BTJ is None or batch.class_B is None or self.preservation is None:
            return
        inputs = self.inputs(batch, x_BLC, batch.class_BTJ)
        weight_B = self.preservation.weight * mx.array(batch.class_B)
        # How far the adapter moves the prediction: the target is the prediction of the base without it.
        preserved = functools.partial(loss.preservation, base_BLC=predict_base(model, inputs), weight_B=weight_B)
        yield Term(inputs, preserved, "preservation", [bool(one) for one in batch.class_B])

    def validation_term(self, model: Transformer, batch: MicroBatch) -> Term:
        """Mean squared error, weighted by a mask if there is one."""
        x_BLC, target_BLC = self.mix(batch)
        # Whatever [train.loss] says, so that runs with different settings can be compared.
        return Term(self.inputs(batch, x_BLC, batch.ctx_BTJ), velocity_loss(batch, target_BLC, LossConfig()))

    def mix(self, batch: MicroBatch) -> tuple[mx.array, mx.array]:
        """(noisy latents, velocity noise - clean), float32 (B, L, C)."""
        tokens = self.architecture.tokens
        x0_BLC = tokens(mx.array(batch.x0_BCHW).view(mx.bfloat16)).astype(mx.float32)
        noise_BLC = tokens(mx.array(batch.noise_BCHW))
        sigma_B11 = sigmas(batch)[:, None, None]
        return (1 - sigma_B11) * x0_BLC + sigma_B11 * noise_BLC, noise_BLC - x0_BLC

    def inputs(self, batch: MicroBatch, x_BLC: mx.array, words_BTJ: np.ndarray) -> dict[str, Any]:
        """Keyword arguments of the model for one prediction. `words_BTJ`: bfloat16 as uint16."""
        height, width = batch.x0_BCHW.shape[2:]
        text_BTJ = mx.array(words_BTJ).view(mx.bfloat16)
        beside = [mx.array(words_BCHW).view(mx.bfloat16) for words_BCHW in batch.references]
        return self.architecture.inputs(x_BLC, (height, width), text_BTJ, sigmas(batch), GUIDANCE, beside)


def sigmas(batch: MicroBatch) -> mx.array:
    return mx.array([s.sigma for s in batch.samples], mx.float32)


def velocity_loss(batch: MicroBatch, target_BLC: mx.array, config: LossConfig) -> Loss:
    """A function from the predicted velocity to one loss per sample, as [train.loss] and the mask weight it."""
    # The arrays are keywords of a partial, so that MLX can compile the function with the model's last blocks.
    arrays = {"target_BLC": target_BLC}
    if config.weight != "none":
        sigma_B = np.array([s.sigma for s in batch.samples])
        arrays["weight_B"] = mx.array(weighting.weight(config.weight, sigma_B).astype(np.float32))
    if batch.mask_BL is not None:
        arrays["mask_BL"] = mx.array(batch.mask_BL)
    if config.kind == "pseudo_huber":
        return functools.partial(loss.pseudo_huber, c=mx.array(config.huber_c, mx.float32), **arrays)
    return functools.partial(loss.mse, **arrays)
