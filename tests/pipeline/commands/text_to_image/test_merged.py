"""The merged transformer, loaded by diffusers, answers as the base does with the adapter merged into it in memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from pipeline.commands.text_to_image import export
from pipeline.commands.text_to_image.export import merge_run, write_merged
from pipeline.store.disk import TEMPORARY
from stages.models.folders import read_config
from stages.text_to_image.families import family
from tests.pipeline.commands.text_to_image.reference import forward, tiny_transformer
from tests.pipeline.commands.text_to_image.test_export_variants import VARIANTS, trained_variant, with_merged_weights


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "transformer"
    tiny_transformer().save_pretrained(folder)
    return folder


def read_by_diffusers(folder: Path, dtype: str = "float32") -> Any:
    import torch
    from diffusers import Flux2Transformer2DModel

    return Flux2Transformer2DModel.from_pretrained(folder, torch_dtype=getattr(torch, dtype)).eval()


@pytest.mark.parametrize("shard", [export.SHARD, 20_000], ids=["one file", "several files"])
@pytest.mark.parametrize("variant", VARIANTS)
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


def test_a_run_is_merged_in_bfloat16_into_the_projects_exports_and_nothing_is_overwritten(base: Path, tmp_path: Path) -> None:
    artifacts = tmp_path / "tables" / "train" / "abc" / "artifacts"
    artifacts.mkdir(parents=True)
    trained_variant(artifacts / "adapter.safetensors", tiny_transformer(), "rslora")
    project: Any = SimpleNamespace(name="cats", path=tmp_path, family=family("tiny"), component=lambda name, fetch: base)
    project.stage = lambda stage_name: SimpleNamespace(result="adapter.safetensors")
    table = SimpleNamespace(folder=tmp_path / "tables" / "train" / "abc", exists=False)
    project.folder = project.current = lambda stage_name: table
    out = merge_run(project, None, dtype="bfloat16")
    assert out == tmp_path / "exports" / "cats-abc-000070-merged"
    assert {str(value.dtype) for value in read_by_diffusers(out, "bfloat16").state_dict().values()} == {"torch.bfloat16"}
    with pytest.raises(ValueError, match="cats-abc-000070-merged exists; move it away"):
        merge_run(project, None, dtype="bfloat16")


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
