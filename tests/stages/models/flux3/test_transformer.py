"""The transformer of FLUX 3 Image against diffusers' own, at tiny sizes in float32."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from stages.models.flux3.load import load_transformer, transformer_config
from stages.models.flux3.transformer import Flux3, Flux3Config, inputs, text_rows
from stages.models.weights import recognise
from stages.text_to_image.families import family
from tests.checkpoints import flux3_as_single_file, random_model

SIZES: dict[str, Any] = {
    "in_channels": 16,
    "cond_in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "axes_dims_rope": [8, 8, 8, 8],
}
CLOSE = 1e-5  # relative to the largest value
SIGMAS = np.array([0.9373, 0.1, 0.5], np.float32)
TARGETS = np.array([0.8, 0.0, 0.45], np.float32)


def random_reference(**sizes: Any) -> Any:
    from diffusers import Flux3Transformer2DModel

    return random_model(Flux3Transformer2DModel, **{**SIZES, **sizes})


def ours(reference: Any, references: bool = True) -> Flux3:
    arrays = {name: mx.array(tensor.numpy()) for name, tensor in reference.state_dict().items()}
    return Flux3(replace(Flux3Config.from_dict(reference.config), references=references), arrays)


def windows(texts: list[np.ndarray]) -> np.ndarray:
    """The rows that the text encoder gives diffusers: those of padding are all there, and equal."""
    return np.stack([np.pad(each, [(0, text_rows(len(each)) - len(each)), (0, 0)], "edge") for each in texts])


def theirs(
    reference: Any, x_BChw: Any, texts: list[np.ndarray], sigmas: Any, targets: Any, beside: list[np.ndarray] | None = None
) -> Any:
    """diffusers' velocity, (B, L, C), its arguments made as its pipeline makes them."""
    import torch
    from diffusers.modular_pipelines.flux3.before_denoise import _prepare_image_ids

    rows = lambda x: torch.as_tensor(x).flatten(2).transpose(1, 2)  # noqa: E731
    text = windows(texts)
    given = {
        "hidden_states": rows(x_BChw),
        "encoder_hidden_states": torch.tensor(text),
        "timestep": torch.tensor(sigmas),
        "img_ids": _prepare_image_ids(*x_BChw.shape[2:], 0.5),
        "txt_ids": torch.cartesian_prod(*[torch.arange(n) for n in (1, 1, 1, text.shape[1])]).float(),
    }
    if beside:
        given["image_cond_hidden_states"] = torch.cat([rows(each) for each in beside], dim=1)
        ids = [_prepare_image_ids(*each.shape[2:], 0.5, -(1 + n)) for n, each in enumerate(beside)]
        given["image_cond_ids"] = torch.cat(ids)
    if reference.config.flow_map:
        given["target_timestep"] = torch.tensor(targets)
    return reference(**given, return_dict=False)[0]


def levelled(texts: list[np.ndarray]) -> tuple[mx.array, mx.array]:
    from stages.text_to_image.train.batches import levelled

    arrays, rows = levelled(texts)
    return mx.array(arrays), mx.array(rows if rows is not None else [len(each) for each in texts])


def prepared(x_BChw: Any, texts: list[np.ndarray], sigmas: Any, targets: Any, beside: Any = None) -> dict[str, Any]:
    text_BTJ, tokens_B = levelled(texts)
    x_BLC, size = mx.array(rows(x_BChw)), x_BChw.shape[2:]
    shown = [mx.array(each) for each in beside or ()]
    return inputs(x_BLC, size, text_BTJ, mx.array(sigmas), None, shown, tokens_B, mx.array(targets))


def rows(x_BChw: np.ndarray) -> np.ndarray:
    return x_BChw.reshape(*x_BChw.shape[:2], -1).swapaxes(1, 2)


def given(size: Any, texts: Any, beside: Any = (), channels: int = 16, features: int = 24) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(sum(texts) + size[0])
    normal = lambda *shape: draw.standard_normal(shape, np.float32)  # noqa: E731
    return (
        normal(len(texts), channels, *size),
        [normal(n, features) for n in texts],
        [normal(len(texts), channels, *each) for each in beside],
    )


def check(got: Any, expected: Any) -> None:
    wanted = expected.numpy()
    assert np.abs(wanted).max() > 0.1
    assert np.abs(np.array(got) - wanted).max() <= CLOSE * np.abs(wanted).max()


def random_case(seed: int) -> tuple[dict[str, Any], Any, Any, Any]:
    draw = np.random.default_rng(seed)
    axes, channels = (2 * draw.integers(1, 6, 4)).tolist(), int(draw.integers(1, 9))
    sizes = {"in_channels": channels, "cond_in_channels": channels, "axes_dims_rope": axes, "attention_head_dim": sum(axes)}
    sizes |= {"num_attention_heads": int(draw.integers(1, 4)), "joint_attention_dim": int(draw.integers(4, 40))}
    sizes |= {"num_layers": int(draw.integers(0, 3)), "num_single_layers": int(draw.integers(1, 3)), "flow_map": bool(seed % 2)}
    return sizes, draw.integers(1, 8, 2).tolist(), draw.integers(1, 81, 2).tolist(), draw.integers(1, 6, (seed, 2)).tolist()


CASES: dict[str, tuple[dict[str, Any], Any, Any, Any]] = {
    "one": ({}, (3, 5), (7,), ()),
    "distilled, unequal captions": ({"flow_map": True}, (4, 2), (3, 80, 41), ()),
    "two windows and two references": ({}, (3, 3), (81, 160), ((2, 4), (5, 3))),
    "distilled, one reference": ({"flow_map": True}, (2, 3), (9,), ((4, 4),)),
    **{f"random sizes {seed}": random_case(seed) for seed in range(4)},
}


@pytest.mark.parametrize("case", CASES)
def test_the_velocity_is_that_of_diffusers_and_that_of_each_sample_alone(case: str) -> None:
    import torch

    sizes, size, texts, beside = CASES[case]
    reference = random_reference(**sizes)
    x_BChw, words, shown = given(size, texts, beside, reference.config.in_channels, reference.config.joint_attention_dim)
    at, to = SIGMAS[: len(texts)], TARGETS[: len(texts)]
    with torch.no_grad():
        expected = theirs(reference, x_BChw, words, at, to, shown)
    model = ours(reference, bool(beside))
    check(model(**prepared(x_BChw, words, at, to, shown)), expected)
    for n, text in enumerate(words):
        one = slice(n, n + 1)
        alone = model(**prepared(x_BChw[one], [text], at[one], to[one], [each[one] for each in shown]))
        check(alone[0], expected[n])


@pytest.mark.parametrize("flow_map", [False, True])
def test_black_forest_labs_single_file_is_recognised_and_its_references_are_left_out_if_none_are_trained(
    flow_map: bool, tmp_path: Path
) -> None:
    reference = random_reference(flow_map=flow_map)
    single = flux3_as_single_file({name: tensor.numpy() for name, tensor in reference.state_dict().items()})
    save_file({k: np.ascontiguousarray(v) for k, v in single.items()}, tmp_path / "model.safetensors")
    sizes = dict(reference.config)
    record = replace(family("flux3-klein-base"), transformer=sizes)
    kept = load_transformer(tmp_path / "model.safetensors", record.without_references())
    assert {b.kind for b in kept.blocks} == {"text", "image", "joint"} and not any("image_cond" in n for n in kept.top)
    shapes = {name: value.shape for name, value in single.items()}
    assert recognise(shapes, record) == "transformer"
    assert recognise(shapes, replace(record, transformer=sizes | {"flow_map": not flow_map})) == ""
    assert recognise(shapes | {"early_stream_modulations.video.lin.weight": (192, 64)}, record) == ""


def test_a_distilled_model_in_the_folder_of_a_base_is_refused_so_that_nobody_trains_on_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**random_reference(flow_map=True).config}))
    with pytest.raises(ValueError, match=r"is distilled \(flow_map\), and flux3-klein-base is a base: choose the other family"):
        transformer_config(tmp_path, family("flux3-klein-base"))
