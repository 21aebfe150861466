"""Tests of the setting [project] components: the weights of one component may lie in a folder of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from pipeline.project.project import Project
from tests import projects


def with_encoder(project: Path, encoder: Path | str, name: str = "text_encoder") -> None:
    projects.edit(project, "commit_seconds", f'components = {{ {name} = "{encoder}" }}\ncommit_seconds')


def quantised(source: Path, folder: Path) -> Path:
    """Write the text encoder in `source` to `folder`, quantised to 4 bits in the format of mlx-lm."""
    folder.mkdir()
    stored, settings = {}, {"group_size": 32, "bits": 4}
    for key, value in mx.load(str(source / "model.safetensors")).items():
        stored[key] = value
        if value.ndim == 2:
            names = (key, key.replace("weight", "scales"), key.replace("weight", "biases"))
            stored |= dict(zip(names, mx.quantize(value, **settings), strict=True))
    config = json.loads((source / "config.json").read_text()) | {"quantization": settings}
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), stored)
    return folder


@pytest.mark.parametrize("form", ["diffusers", "quantised by MLX"])
def test_a_text_encoder_in_another_folder_gives_the_embeddings_of_one_folder(form, tmp_path, tiny_weights):
    given = tiny_weights / "text_encoder"
    apart = shutil.copytree(given, tmp_path / "apart") if form == "diffusers" else quantised(given, tmp_path / "apart")
    whole = shutil.copytree(tiny_weights, tmp_path / "whole")
    shutil.rmtree(whole / "text_encoder")
    without = projects.make(tmp_path / "two", shutil.copytree(whole, tmp_path / "without"), images=1)
    shutil.copytree(apart, whole / "text_encoder")
    one = projects.make(tmp_path / "one", whole, images=1)
    with_encoder(without, "../apart")
    stages = ("images", "captions", "embeddings")
    for folder in (one, without):
        projects.build(folder, *stages)
    assert projects.content(one, "embeddings") == projects.content(without, "embeddings")
    assert Project(one).recipe("embeddings") == Project(without).recipe("embeddings")


def test_another_text_encoder_makes_the_embeddings_again_and_no_latent(tmp_path, tiny_weights):
    project = projects.make(tmp_path / "project", tiny_weights, images=1)
    stages = ("images", "captions", "buckets", "latents", "embeddings")
    projects.build(project, *stages)
    with_encoder(project, quantised(tiny_weights / "text_encoder", tmp_path / "apart"))
    again = projects.written(projects.build(project, *stages))
    assert again["embeddings"] > 0 and not any(again[name] for name in stages[:-1])


def test_a_component_that_is_missing_unknown_or_another_is_one_line(tmp_path, tiny_weights):
    project = projects.make(tmp_path / "project", tiny_weights, images=1)
    wrong = {
        "text_encodr": (
            tiny_weights,
            r"project\.components must name any of transformer, .*did you mean text_encoder",
        ),
        "text_encoder": (tiny_weights / "vae", r"components\.text_encoder must be the text encoder, got .*holds the autoencoder"),
        "transformer": ("/no/such/place", r"components\.transformer must be a folder, a file or a hub id .*does not exist"),
    }
    for name, (path, message) in wrong.items():
        with pytest.raises(ValueError, match=message) as caught:
            Project(project, {"project.components": {name: str(path)}}).component(name)
        assert "\n" not in str(caught.value)


def test_a_plan_names_the_place_where_a_component_is_missing(tmp_path, tiny_weights):
    project = projects.make(tmp_path / "project", tiny_weights, images=1)
    with_encoder(project, "/no/such/place")
    said = projects.latentmill(project, "plan", code=2)
    assert (
        said.startswith("error: project.components.text_encoder must be a folder, a file or a hub id")
        and "\n" not in said.strip()
    )
