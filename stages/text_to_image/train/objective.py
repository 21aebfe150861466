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
from stages.tuner.blockwise.backprop import predict_base
from stages.tuner.diffusion import loss, weighting
from stages.tuner.task import Term

GUIDANCE = 1.0  # the guidance that models with embedded guidance are trained at, as all trainers but one do

Loss = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class FlowMatching:
    """The training objective of flow matching. The model learns to predict the velocity `noise - clean`. `architecture`
    holds the functions of the model's architecture. `loss` holds the settings [train.loss]. `preservation` holds the
    settings [train.preservation], or is None. `separable` is True if the loss of each sample depends on that sample
    alone.

    With `preservation`, a second loss penalises changes of the base model's predictions for class captions. A batch may
    be divided into micro-batches only if `separable` is True.
    """

    architecture: Architecture
    loss: LossConfig
    preservation: PreservationConfig | None = None
    separable: bool = True

    def terms(self, model: Transformer, batch: MicroBatch) -> Iterator[Term]:
        """Yield one or two loss terms of `batch`, a micro-batch. A term holds the inputs of `model` and the function
        that computes the loss. The first is the loss of the predicted velocity. The second is the preservation loss:
        how far the adapter changes the prediction for class captions. A class caption has the class word in place of
        the trigger word.

        The second term is left out if no sample has a class caption, or if [train.preservation] is not set.
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
        """Return the loss term of `batch`, a micro-batch of held-out samples. A term holds the inputs of the model and
        the function that computes the loss from the model's prediction. The caller makes this prediction, so the
        argument `model` is not used here. The loss is the mean squared error. A mask, if there is one, weights the
        image tokens. The settings [train.loss] are ignored, so runs with different settings can be compared.
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
        """Return the inputs of the model for one prediction, as a dict from argument name to value. `x_BLC` holds the
        noisy latents, `(batch, tokens, channels)`. `words_BTJ` holds the text embeddings, `(batch, text rows,
        features)`. Its values are bfloat16, stored as uint16. `batch` gives the image size, the noise levels and the
        reference images.
        """
        height, width = batch.x0_BCHW.shape[2:]
        text_BTJ = mx.array(words_BTJ).view(mx.bfloat16)
        beside = [mx.array(words_BCHW).view(mx.bfloat16) for words_BCHW in batch.references]
        return self.architecture.inputs(x_BLC, (height, width), text_BTJ, sigmas(batch), GUIDANCE, beside)


def sigmas(batch: MicroBatch) -> mx.array:
    """Return the noise level of each sample, as a float32 array of shape `(batch,)`. The level is 0 for a clean latent
    and 1 for pure noise.
    """
    return mx.array([s.sigma for s in batch.samples], mx.float32)


def velocity_loss(batch: MicroBatch, target_BLC: mx.array, config: LossConfig) -> Loss:
    """Return the loss function of a micro-batch (samples computed at once). The function maps the predicted velocity to one
    loss per sample. `batch` has the noise levels and masks of the samples. `target_BLC` is the true velocity, `noise -
    clean`, with the shape `(batch, tokens, channels)`. `config` holds the settings [train.loss].

    The settings choose the kind of loss and the weight of each noise level. The mask of the micro-batch gives the weights
    of the image tokens. Without a mask, all tokens count equally.

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
