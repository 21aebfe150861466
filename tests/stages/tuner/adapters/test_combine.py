"""LoRAs that are joined, cut to a lower rank and extracted, against PEFT's own arithmetic."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from stages.tuner.adapters import combine
from stages.tuner.adapters.lora import A, B, arrays_of_linear, merge
from stages.tuner.adapters.targets import Target

NAMES = ("one", "two")
SHAPES = {"one": (24, 40), "two": (33, 16)}  # outputs, inputs


def lora(seed: int, rank: int, names: tuple[str, ...] = NAMES) -> dict[str, mx.array]:
    random = np.random.default_rng(seed)
    arrays = {}
    for name in names:
        outputs, inputs = SHAPES[name]
        arrays[name + A] = mx.array(random.normal(0, 0.3, (rank, inputs)).astype(np.float32))
        arrays[name + B] = mx.array(random.normal(0, 0.3, (outputs, rank)).astype(np.float32))
    return arrays


def change(arrays: Any, name: str, scale: float = 1.0) -> np.ndarray:
    return scale * np.asarray(arrays[name + B], dtype=np.float64) @ np.asarray(arrays[name + A], dtype=np.float64)


def in_peft(adapters: dict[str, tuple[dict[str, mx.array], int, float]]) -> Any:
    """A model of PEFT with these adapters: name -> (arrays, rank, alpha)."""
    import torch
    from peft import LoraConfig, get_peft_model

    modules = {name: torch.nn.Linear(inputs, outputs, bias=False) for name, (outputs, inputs) in SHAPES.items()}
    model: Any = None
    for adapter, (arrays, rank, alpha) in adapters.items():
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(NAMES))
        if model is None:
            model = get_peft_model(torch.nn.ModuleDict(modules), config, adapter_name=adapter)
        else:
            model.add_adapter(adapter, config)
        for name in NAMES:
            linear = model.base_model.model[name]
            linear.lora_A[adapter].weight.data = torch.tensor(np.asarray(arrays[name + A]))
            linear.lora_B[adapter].weight.data = torch.tensor(np.asarray(arrays[name + B]))
    return model


def peft_change(model: Any, adapter: str, name: str) -> np.ndarray:
    return model.base_model.model[name].get_delta_weight(adapter).detach().numpy()


def test_a_join_is_pefts_concatenation_with_its_strengths() -> None:
    first, second = lora(1, 4), lora(2, 6)
    model = in_peft({"first": (first, 4, 8), "second": (second, 6, 3)})
    model.add_weighted_adapter(["first", "second"], [0.8, 0.5], "sum", combination_type="cat")
    joined, scales = combine.join([(first, dict.fromkeys(NAMES, 2.0), 0.8), (second, dict.fromkeys(NAMES, 0.5), 0.5)])
    for name in NAMES:
        assert joined[name + A].shape[0] == 10 and scales[name] == 1.0
        assert np.abs(change(joined, name) - peft_change(model, "sum", name)).max() < 1e-5


def test_a_resized_lora_is_pefts_svd_and_states_its_error() -> None:
    first = lora(1, 8)
    model = in_peft({"first": (first, 8, 16), "unused": (first, 8, 16)})  # PEFT decomposes only if there are two
    model.add_weighted_adapter(["first", "unused"], [1.0, 0.0], "small", combination_type="svd", svd_rank=3)
    cut = combine.resize(first, dict.fromkeys(NAMES, 2.0), 3)
    lost = whole = 0.0
    for name in NAMES:
        expected = peft_change(model, "small", name)
        assert cut.arrays[name + A].shape[0] == 3 and cut.scales[name] == 1.0
        assert np.abs(change(cut.arrays, name) - expected).max() < 1e-5
        lost += ((change(first, name, 2.0) - expected) ** 2).sum()
        whole += (change(first, name, 2.0) ** 2).sum()
    assert cut.error == pytest.approx((lost / whole) ** 0.5, rel=1e-5)
    assert cut.worst[1] >= cut.error


def test_an_extracted_lora_is_pefts_exact_for_a_low_rank_change_and_none_without_a_change() -> None:
    first = lora(1, 5)
    model = in_peft({"first": (first, 5, 5), "unused": (first, 5, 5)})
    model.add_weighted_adapter(["first", "unused"], [1.0, 0.0], "small", combination_type="svd", svd_rank=3)
    for name in NAMES:
        weight = mx.array(change(first, name).astype(np.float32))
        whole, small = combine.extract(name, weight, 16), combine.extract(name, weight, 3)
        assert whole.arrays[name + A].shape[0] == 5 and whole.error < 1e-5
        assert np.abs(change(whole.arrays, name) - change(first, name)).max() < 1e-5
        assert np.abs(change(small.arrays, name) - peft_change(model, "small", name)).max() < 1e-5
    assert combine.extract("one", mx.zeros((24, 40)), 4).arrays == {}


def test_a_dora_and_shapes_that_differ_are_refused() -> None:
    first = lora(1, 4)
    dora = first | {"one.lora_magnitude_vector": mx.ones(24)}
    with pytest.raises(ValueError, match="only plain LoRAs can be combined and resized"):
        combine.resize(dora, dict.fromkeys(NAMES, 1.0), 2)
    other = {**lora(2, 4), "one" + B: mx.zeros((25, 4))}
    with pytest.raises(ValueError, match="are they of one model"):
        combine.join([(first, dict.fromkeys(NAMES, 1.0), 1.0), (other, dict.fromkeys(NAMES, 1.0), 1.0)])


@pytest.mark.parametrize("variant", ["lora", "lokr", "whole w2"])
def test_the_norm_of_a_change_is_that_of_what_merging_adds_to_the_weight(variant: str) -> None:
    target = Target("a", 24, 36, 2 if variant != "whole w2" else 30, 5.0, "lora" if variant == "lora" else "lokr")
    draw = np.random.default_rng(0)
    arrays = {f"a{end}": mx.array(draw.normal(size=shape).astype(np.float32)) for end, shape in target.shapes.items()}
    weight = mx.array(draw.normal(size=(24, 36)).astype(np.float32))
    added = merge(weight, arrays_of_linear(arrays, "a"), target.scale) - weight
    assert combine.norm(arrays, "a", target.scale) == pytest.approx(float(np.linalg.norm(np.array(added))), rel=1e-4)


@pytest.mark.parametrize("width", [0.05, 0.1, 0.25])
def test_an_average_of_checkpoints_is_karras_power_function_average_of_adapters_that_stand_still_between_them(
    width: float,
) -> None:
    # The paper's running form: beta_t = (1 - 1/t)^(gamma + 1), with gamma by its own equation for the width.
    gamma = max(np.roots([1, 7, 16 - width**-2, 12 - width**-2]).real)
    assert width**2 == pytest.approx((gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3)))
    steps, values, running = [20, 45, 80, 100], [3.0, -1.0, 4.0, 2.0], 0.0
    for t in range(1, 101):
        beta = (1 - 1 / t) ** (gamma + 1)
        running = beta * running + (1 - beta) * values[next(n for n, step in enumerate(steps) if t <= step)]
    weights = combine.power_weights(steps, width)
    assert sum(weights) == pytest.approx(1)
    assert float(np.dot(weights, values)) == pytest.approx(running, rel=1e-9)


def test_averaged_arrays_are_their_weighted_mean_and_other_ranks_are_refused() -> None:
    one, other = lora(0, 2), lora(1, 2)
    scales = dict.fromkeys(NAMES, 0.5)
    found, kept = combine.average([(one, scales), (other, scales)], [0.25, 0.75])
    np.testing.assert_allclose(found["one" + A], 0.25 * one["one" + A] + 0.75 * other["one" + A], rtol=1e-6)
    assert kept == scales
    with pytest.raises(ValueError, match="not of one run"):
        combine.average([(one, scales), (lora(1, 2, NAMES[:1]), scales)], [0.5, 0.5])


def test_strengths_by_pattern_weigh_the_change_of_linears_and_0_leaves_them_out() -> None:
    arrays, scales = lora(0, 2), dict.fromkeys(NAMES, 1.0)
    found, weighted = combine.weighted(arrays, scales, {NAMES[0]: 0.5, NAMES[1]: 0.0})
    assert weighted[NAMES[0]] == 0.5 and NAMES[1] not in weighted and not any(key.startswith(NAMES[1]) for key in found)
    np.testing.assert_allclose(change(found, NAMES[0], weighted[NAMES[0]]), 0.5 * change(arrays, NAMES[0]))
    with pytest.raises(ValueError, match="'nothing' matches no Linear of the adapter"):
        combine.weighted(arrays, scales, {"nothing": 1.0})
