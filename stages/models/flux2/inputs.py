"""The inputs of the FLUX.2 transformer: latents as tokens, positions of tokens and text rows, noise level, guidance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models.flux2.config import Flux2Config

REFERENCE_STEP = 10  # distance of two reference images along the first axis of positions; the drawn image is at 0


def image_ids(height: int, width: int, image: int = 0) -> np.ndarray:
    """Return the position of each token of one image. The result is an integer array (height * width, 4). A position is
    (10 * image, row, column, 0). Tokens go row by row. `height` and `width` are the rows and columns of the image's
    latent. `image` is 0 for the image that is drawn. Reference images have 1, 2, ....
    """
    row, col = np.indices((height, width)).reshape(2, -1)
    return np.stack([0 * row + REFERENCE_STEP * image, row, col, 0 * row], axis=-1)


def reference_ids(sizes: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the positions of the tokens of all reference images, one image after another. The result is an integer array
    (tokens, 4). `sizes` has the (height, width) of each image's latent.
    """
    return np.concatenate([image_ids(*size, image=number) for number, size in enumerate(sizes, 1)])


def text_ids(count: int) -> np.ndarray:
    """Return the positions of `count` rows of a text embedding, padding included. The result is an integer array (count, 4). Each
    position is (0, 0, 0, index).
    """
    ids_T4 = np.zeros((count, 4), np.int64)
    ids_T4[:, 3] = np.arange(count)
    return ids_T4


def tokens(x_BCHW: mx.array) -> mx.array:
    """Lay out latents as a sequence of tokens, row by row. x_BCHW is (batch, channels, height, width). The result is (batch,
    height * width, channels).
    """
    return x_BCHW.reshape(*x_BCHW.shape[:2], -1).swapaxes(1, 2)


def inputs(
    x_BLC: mx.array,
    size: tuple[int, int],
    text_BTJ: mx.array,
    sigma_B: mx.array,
    guidance: float | None = None,
    references: Sequence[mx.array] = (),
) -> dict[str, Any]:
    """Return the transformer's inputs for a batch of noisy latents: a dict of keyword arguments of `Flux2.enter`. x_BLC
    is the latents as tokens, (batch, height * width, channels). `size` is (height, width) of the latents. text_BTJ is
    the text embeddings, (batch, text rows, features). sigma_B is the noise level of each sample, from 0 (clean) to 1
    (noise). `guidance` is one guidance value for all samples. It is None for a model without a guidance input.
    `references` has one array of clean latents per reference image, (batch, channels, height, width).
    """
    found = {
        "x_BLC": x_BLC,
        "x_ids_L4": image_ids(*size),
        "ctx_BTJ": text_BTJ,
        "ctx_ids_T4": text_ids(text_BTJ.shape[1]),
        "timesteps_B": sigma_B,
        "guidance_B": None if guidance is None else mx.full(sigma_B.shape, guidance),
    }
    if references:
        found["references_BRC"] = mx.concatenate([tokens(each).astype(x_BLC.dtype) for each in references], axis=1)
        found["references_ids_R4"] = reference_ids([(each.shape[2], each.shape[3]) for each in references])
    return found


def zero_inputs(
    config: Flux2Config, samples: int, size: tuple[int, int], text_rows: int, references: Sequence[tuple[int, int]] = ()
) -> dict[str, Any]:
    """Return inputs of the transformer that are all zero, to estimate memory: a dict of keyword arguments of
    `Flux2.enter`. The arrays are lazy. They take no memory until they are computed. `config` has the transformer's
    sizes. `samples` is the batch size. `size` is the (height, width) of the latents. `text_rows` is the number of rows
    of one text embedding. `references` has the (height, width) of each reference image's latent.
    """
    height, width = size
    beside = [mx.zeros((samples, config.in_channels, *each)) for each in references]
    x_BLC = mx.zeros((samples, height * width, config.in_channels))
    text_BTJ = mx.zeros((samples, text_rows, config.joint_attention_dim))
    return inputs(x_BLC, size, text_BTJ, mx.zeros((samples,)), references=beside) | {"guidance_B": mx.zeros((samples,))}
