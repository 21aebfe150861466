"""The Z-Image transformer against diffusers' own, at tiny sizes in float32."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from stages.models.z_image.transformer import ZImage, ZImageConfig
from tests.checkpoints import random_model

SIZES = {
    "in_channels": 4,
    "dim": 64,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 24,
    "axes_dims": [8, 12, 12],
    "axes_lens": [256, 64, 64],
}
CLOSE = 1e-5  # relative to the largest value
SIGMAS = np.array([0.9373, 0.1, 0.5], np.float32)


def random_reference(**sizes: Any) -> Any:
    from diffusers import ZImageTransformer2DModel

    return random_model(ZImageTransformer2DModel, **{**SIZES, **sizes})


def ours(reference: Any) -> ZImage:
    arrays = {name: mx.array(tensor.numpy()) for name, tensor in reference.state_dict().items()}
    return ZImage(ZImageConfig.from_dict(reference.config), arrays)


def theirs(reference: Any, x_BCHW: Any, texts: list[np.ndarray], sigmas: np.ndarray) -> Any:
    """diffusers' velocity, noise minus clean, (B, C, H, W)."""
    import torch

    frames = [torch.as_tensor(x)[:, None] for x in x_BCHW]
    found = reference(frames, torch.tensor(1 - sigmas), [torch.tensor(t) for t in texts], return_dict=False)[0]
    return -torch.stack(found)[:, :, 0]


def folded(x_BCHW: np.ndarray) -> np.ndarray:
    """(B, L, 4 C), as the transformer reads it: the channel is the fastest index of a patch."""
    B, C, H, W = x_BCHW.shape
    return x_BCHW.reshape(B, C, H // 2, 2, W // 2, 2).transpose(0, 2, 4, 3, 5, 1).reshape(B, H * W // 4, 4 * C)


def levelled(texts: list[np.ndarray]) -> tuple[mx.array, mx.array]:
    """Texts of unequal rows as one array, filled up with ones, which must not be read; and the rows of each."""
    most = max(len(each) for each in texts)
    return mx.array(np.stack([np.pad(each, [(0, most - len(each)), (0, 0)], constant_values=1) for each in texts])), mx.array(
        [len(each) for each in texts]
    )


def given(size: tuple[int, int], rows: tuple[int, ...], channels: int = 4, features: int = 24) -> tuple[Any, Any]:
    draw = np.random.default_rng(sum(rows) + size[0])
    x_BCHW = draw.standard_normal((len(rows), channels, 2 * size[0], 2 * size[1]), np.float32)
    return x_BCHW, [draw.standard_normal((n, features), np.float32) for n in rows]


def check(got: Any, expected: np.ndarray) -> None:
    assert np.abs(expected).max() > 0.1
    assert np.abs(np.array(got) - expected).max() <= CLOSE * np.abs(expected).max()


def random_case(seed: int) -> tuple[dict[str, Any], Any, Any]:
    draw = np.random.default_rng(seed)
    heads, axes = int(draw.integers(1, 4)), (2 * draw.integers(1, 6, 3)).tolist()
    sizes = {"in_channels": int(draw.integers(1, 6)), "dim": heads * sum(axes), "n_heads": heads, "n_kv_heads": heads}
    sizes |= {"n_layers": int(draw.integers(0, 3)), "n_refiner_layers": int(draw.integers(1, 3)), "axes_dims": axes}
    sizes["cap_feat_dim"] = int(draw.integers(4, 40))
    return sizes, tuple(draw.integers(1, 8, 2).tolist()), tuple(draw.integers(1, 33, 2).tolist())


CASES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "both padded": ({}, (3, 5), (7,)),
    "neither padded": ({}, (4, 8), (32,)),
    "unequal texts": ({}, (2, 3), (3, 17, 32)),
    "longer unequal texts": ({}, (5, 7), (40, 33, 64)),
    **{f"random sizes {seed}": random_case(seed) for seed in range(4)},
}


@pytest.mark.parametrize("case", CASES)
def test_the_velocity_is_that_of_diffusers_and_that_of_each_sample_alone(case: str) -> None:
    import torch

    sizes, size, rows = CASES[case]
    reference = random_reference(**sizes)
    x_BCHW, texts = given(size, rows, reference.config.in_channels, reference.config.cap_feat_dim)
    sigmas = SIGMAS[: len(rows)]
    with torch.no_grad():
        expected = theirs(reference, x_BCHW, texts, sigmas).numpy()
    model = ours(reference)
    text_BTJ, tokens_B = levelled(texts)
    got = model(mx.array(folded(x_BCHW)), size, text_BTJ, mx.array(sigmas), tokens_B)
    check(got, folded(expected))
    for n, text in enumerate(texts):
        alone = model(mx.array(folded(x_BCHW[n : n + 1])), size, mx.array(text[None]), mx.array(sigmas[n : n + 1]))
        check(alone[0], folded(expected)[n])
