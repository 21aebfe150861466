"""Adapters of every variant: their settings, their arrays after some training, their twins in PEFT."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.models.flux2.transformer import Flux2
from stages.tuner.adapters import lora
from stages.tuner.adapters.lora import merge
from stages.tuner.adapters.targets import Target, fresh_adapter, select_targets, target_scales, target_weights
from stages.tuner.weights import Weight
from tests.stages.tuner.blockwise import test_backprop

OUT, IN = 48, 32

VARIANTS = {
    "lora": {},
    "dora": {"variant": "dora"},
    "lokr": {"variant": "lokr", "factor": 4},
    "whole lokr": {"variant": "lokr", "factor": 4, "rank": 64},
    "rslora": {"rslora": True},
}
PEFT_NAMES = {
    lora.A: "lora_A.default.weight",
    lora.B: "lora_B.default.weight",
    lora.MAGNITUDE: "lora_magnitude_vector.default.weight",
    lora.W1: "lokr_w1.default",
    lora.W2: "lokr_w2.default",
    lora.W2_A: "lokr_w2_a.default",
    lora.W2_B: "lokr_w2_b.default",
}


def normal(seed: int, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def targets_of(linears: dict[str, tuple[int, int]], variant: str, rank: int = 4) -> list[Target]:
    return select_targets(linears, ["*"], **{"rank": rank, "alpha": 6.0, **VARIANTS[variant]})


def trained(targets: list[Target], bases: dict) -> dict[str, mx.array]:
    return test_backprop.filled(fresh_adapter(targets, 3, bases), 0.3)


def in_peft(variant: str, weight: mx.array, arrays: dict[str, mx.array], target: Target) -> Any:
    """A torch Linear with PEFT's own adapter of the same numbers."""
    import torch
    from peft import LoKrConfig, LoraConfig, inject_adapter_in_model

    model = torch.nn.ModuleDict({"q": torch.nn.Linear(IN, OUT, bias=False)})
    if variant.endswith("lokr"):
        alpha = 6 if variant == "lokr" else target.rank  # a whole w2 has no rank to divide by
        config = LoKrConfig(r=target.rank, alpha=alpha, target_modules=["q"], decompose_factor=target.factor)
    else:
        config = LoraConfig(r=4, lora_alpha=6, target_modules=["q"], use_dora=variant == "dora", use_rslora=variant == "rslora")
    with torch.no_grad():
        model["q"].weight.copy_(torch.tensor(np.array(weight)))
    inject_adapter_in_model(config, model)
    there = dict(model["q"].named_parameters())
    with torch.no_grad():
        for ending, value in arrays.items():
            there[PEFT_NAMES[ending]].copy_(torch.tensor(np.array(value)))
    return model["q"]


CONFIG = replace(test_backprop.CONFIG, num_layers=1, num_single_layers=2)
tiny = functools.partial(test_backprop.tiny, config=CONFIG)


def adapted(model: Flux2, variant: str):
    targets = targets_of(model.linears(), variant)
    return trained(targets, target_weights(model.blocks, targets)), target_scales(targets)


def merged_weights(
    weights: Mapping[str, Weight], adapters: Mapping[str, mx.array], scales: Mapping[str, float]
) -> dict[str, Weight]:
    """All weights by name, "<linear>.weight" and the like; those of the Linears in `scales` are merged with their adapters."""
    merged = {
        f"{name}.weight": merge(weights[f"{name}.weight"], lora.arrays_of_linear(adapters, name), scales[name]) for name in scales
    }
    return {**weights, **merged}
