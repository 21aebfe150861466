"""The inputs of the FLUX.2 transformer: latents as tokens, positions of tokens and text rows, noise level, guidance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models.flux2.config import Flux2Config

REFERENCE_STEP = 10  # distance of two reference images along the first axis of positions; the drawn image is at 0


def image_ids(height: int, width: int, image: int = 0) -> np.ndarray:
    """(tokens, 4): (10 * image, row, column, 0), row by row. Image 0 is drawn; references count from 1."""
    row, col = np.indices((height, width)).reshape(2, -1)
    return np.stack([0 * row + REFERENCE_STEP * image, row, col, 0 * row], axis=-1)


def reference_ids(sizes: Sequence[tuple[int, int]]) -> np.ndarray:
    """(tokens, 4) of all reference images, one after another. `sizes` are (height, width) of their latents."""
    return np.concatenate([image_ids(*size, image=number) for number, size in enumerate(sizes, 1)])


def text_ids(count: int) -> np.ndarray:
    """(count, 4): (0, 0, 0, index), padding included."""
    ids_T4 = np.zeros((count, 4), np.int64)
    ids_T4[:, 3] = np.arange(count)
    return ids_T4


def tokens(x_BCHW: mx.array) -> mx.array:
    """(B, C, H, W) -> (B, H W, C), row by row."""
    return x_BCHW.reshape(*x_BCHW.shape[:2], -1).swapaxes(1, 2)


def inputs(
    x_BLC: mx.array,
    size: tuple[int, int],
    text_BTJ: mx.array,
    sigma_B: mx.array,
    guidance: float | None = None,
    references: Sequence[mx.array] = (),
) -> dict[str, Any]:
    """Keyword arguments of `Flux2.enter` for a batch of noisy latents; see `Architecture.inputs`."""
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
    """Lazy inputs of zeros, for estimates of memory. Sizes are (height, width) of latents."""
    height, width = size
    beside = [mx.zeros((samples, config.in_channels, *each)) for each in references]
    x_BLC = mx.zeros((samples, height * width, config.in_channels))
    text_BTJ = mx.zeros((samples, text_rows, config.joint_attention_dim))
    return inputs(x_BLC, size, text_BTJ, mx.zeros((samples,)), references=beside) | {"guidance_B": mx.zeros((samples,))}
