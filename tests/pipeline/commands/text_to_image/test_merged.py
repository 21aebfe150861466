"""The merged transformer, loaded by diffusers, answers as the base does with the adapter merged into it in memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

import stages  # noqa: F401  a fast BLAS, before MLX
from pipeline.commands.text_to_image import export
from pipeline.commands.text_to_image.export import write_adapter, write_merged
from pipeline.store.disk import TEMPORARY
from stages.models.folders import read_config
from stages.text_to_image.families import family
from stages.tuner import checkpoint
from stages.tuner.adapters.targets import adapter_metadata, fresh_adapter, select_targets
from tests.checkpoints import SINGLE_FILES
from tests.pipeline.commands.text_to_image.reference import forward, tiny_transformer
from tests.pipeline.commands.text_to_image.test_export_variants import VARIANTS, trained_variant, with_merged_weights
from tests.stages.models.flux3 import test_transformer as flux3
from tests.stages.models.z_image import test_transformer as z_image


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "transformer"
    tiny_transformer().save_pretrained(folder)
    return folder


def read_by_diffusers(folder: Path, dtype: str = "float32") -> Any:
    import torch
    from diffusers import Flux2Transformer2DModel

    return Flux2Transformer2DModel.from_pretrained(folder, torch_dtype=getattr(torch, dtype)).eval()


@pytest.mark.parametrize(("variant", "shard"), [*((variant, export.SHARD) for variant in VARIANTS), ("lokr", 20_000)])
def test_diffusers_loads_the_folder_and_answers_as_the_merged_weights_do(
    variant: str, shard: int, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "SHARD", shard)
    arrays, scales = trained_variant(tmp_path / "adapter.safetensors", tiny_transformer(), variant)
    out = write_merged(base, family("tiny"), tmp_path / "adapter.safetensors", tmp_path / "out", dtype="float32")
    wanted = with_merged_weights(tiny_transformer(), arrays, scales)
    assert np.abs(wanted - forward(tiny_transformer())).max() > 0.01
    np.testing.assert_allclose(forward(read_by_diffusers(out)), wanted, atol=1e-5)
    assert (len(list(out.glob("*.safetensors"))) > 1) == (shard == 20_000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter.safetensors", "out"]


def flux3_theirs(model: Any) -> np.ndarray:
    return np.asarray(flux3.theirs(model, *FLUX3_CASE[:2], flux3.SIGMAS[:1], flux3.TARGETS[:1], FLUX3_CASE[2]).detach())


def z_image_theirs(model: Any) -> np.ndarray:
    return np.asarray(z_image.theirs(model, *Z_IMAGE_CASE, z_image.SIGMAS[:1]).detach())


FLUX3_CASE = flux3.given((3, 4), (9,), ((2, 2),))  # with a reference image: its blocks are merged too
Z_IMAGE_CASE = z_image.given((3, 5), (7,))
OTHERS: dict[str, tuple[Any, Any, str]] = {  # family -> reference, its prediction, diffusers' loader
    "flux3-klein-base": (flux3.random_reference, flux3_theirs, "Flux3LoraLoaderMixin"),
    "z-image": (z_image.random_reference, z_image_theirs, "ZImageLoraLoaderMixin"),
}


@pytest.mark.parametrize("layout", ["folder", "single file", "quantised for MLX"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_merged_model_of_each_other_architecture_predicts_in_diffusers_as_its_base_with_the_adapter(
    name: str, layout: str, tmp_path: Path
) -> None:
    from diffusers.loaders import lora_pipeline

    reference, predict, mixin = OTHERS[name]
    model, path = reference(), tmp_path / "base"
    record = dataclasses.replace(family(name), transformer=dict(model.config))
    state = {key: np.ascontiguousarray(value.numpy()) for key, value in model.state_dict().items()}
    if layout == "folder":
        model.save_pretrained(path)
    elif layout == "single file":
        path = tmp_path / "model.safetensors"
        save_file({key: np.ascontiguousarray(value) for key, value in SINGLE_FILES[record.code](state).items()}, path)
    else:  # nothing is packed here: config.json says nothing but how weights would be
        path.mkdir()
        save_file(state, path / "model.safetensors")
        (path / "config.json").write_text('{"quantization": {"group_size": 32, "bits": 8}}')
    loaded = record.architecture.load_transformer(path, record)
    targets = select_targets(loaded.linears(), ["*"], rank=2, alpha=6.0)
    arrays = fresh_adapter(targets, 0, {})
    arrays = {key: 0.2 * mx.random.normal(value.shape, key=mx.random.key(n)) for n, (key, value) in enumerate(arrays.items())}
    checkpoint.write_arrays(tmp_path / "a.safetensors", arrays, {"family": name, **adapter_metadata(targets)})
    file = write_adapter(tmp_path / "a.safetensors", record, tmp_path / "exports", "diffusers", dtype="float32", metadata={})
    before, loader = predict(model), getattr(lora_pipeline, mixin)
    peft, metadata = loader.lora_state_dict(str(file), return_lora_metadata=True)
    loader.load_lora_into_transformer(peft, model, metadata=metadata)
    wanted = predict(model)
    assert np.abs(wanted - before).max() > 0.1 * np.abs(before).max()
    out = write_merged(path, record, tmp_path / "a.safetensors", tmp_path / "out", dtype="float32")
    found = predict(type(model).from_pretrained(out).eval())
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_an_adapter_of_another_model_is_refused_and_leaves_nothing_behind(base: Path, tmp_path: Path) -> None:
    wide = family("klein-base-4b")
    trained_variant(tmp_path / "adapter.safetensors", tiny_transformer(), "rslora")
    (tmp_path / "wide").mkdir()
    with pytest.raises(ValueError, match=r"the adapter's .* must have the shape \(3072, 12288\), got \(32, 128\)"):
        write_merged(tmp_path / "wide", wide, tmp_path / "adapter.safetensors", tmp_path / "out", dtype="bfloat16")
    small = dataclasses.replace(family("tiny"), transformer=read_config(base))
    with pytest.raises(ValueError, match="there are no weights"):
        write_merged(tmp_path / "wide", small, tmp_path / "adapter.safetensors", tmp_path / "out", dtype="bfloat16")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(TEMPORARY + "*"))
    with pytest.raises(ValueError, match="wide exists; move it away"):
        write_merged(base, small, tmp_path / "adapter.safetensors", tmp_path / "wide", dtype="bfloat16")
