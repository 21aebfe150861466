"""A tiny transformer with an adapter of any variant, and one batch for it."""

import functools
from dataclasses import replace

import mlx.core as mx
import numpy as np

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.models.flux2.transformer import Flux2, image_ids, text_ids
from stages.tuner.adapters import lora
from stages.tuner.adapters.initial import target_weights
from stages.tuner.adapters.targets import target_scales
from tests.stages.tuner.adapters.variants import normal, targets_of, trained
from tests.stages.tuner.blockwise import test_backprop

CONFIG = replace(test_backprop.CONFIG, num_layers=1, num_single_layers=2)


def tiny(dtype: mx.Dtype = mx.float32) -> Flux2:
    rng = np.random.default_rng(1)
    draw = {name: rng.normal(size=shape) / shape[-1] ** 0.5 for name, shape in CONFIG.shapes().items()}
    return Flux2(CONFIG, {name: mx.array(value, dtype) for name, value in draw.items()})


def adapted(model: Flux2, variant: str):
    targets = targets_of(model.linears(), variant)
    return trained(targets, target_weights(model.blocks, targets)), target_scales(targets)


def batch() -> dict:
    return {
        "x_BLC": normal(1, 2, 12, 8),
        "x_ids_L4": image_ids(3, 4),
        "ctx_BTJ": normal(2, 2, 5, 24),
        "ctx_ids_T4": text_ids(5),
        "timesteps_B": mx.array([0.3, 0.8]),
    }


def squared(prediction: mx.array, target: mx.array) -> mx.array:
    return mx.square(prediction.astype(mx.float32) - target).mean(axis=(1, 2))


LOSS = functools.partial(squared, target=normal(9, 2, 12, 8))


def linear_for(adapters, scales):
    def of(block):
        inside = {n.removeprefix(f"{block}."): a for n, a in adapters.items() if n.startswith(f"{block}.")}
        return lora.adapted_linear(inside, {n.removeprefix(f"{block}."): s for n, s in scales.items()})

    return of
