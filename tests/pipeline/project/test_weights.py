"""Tests of the setting [project] components: the weights of one component may lie in a folder of their own."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import huggingface_hub
import mlx.core as mx
import pytest
from huggingface_hub import constants, errors

from pipeline.project import weights
from pipeline.project.project import Project
from stages.models.family import FOLDERS
from stages.models.flux2.architecture import FLUX2
from stages.models.folders import locate
from stages.text_to_image.families import family
from tests import checkpoints, projects

HUB = "black-forest-labs/FLUX.2-klein-base-4B"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def cache_repository(cache, name, *folders):
    """Write a repository into the cache as the hub's client does, and return its snapshot's folder."""
    root = cache / f"models--{name.replace('/', '--')}"
    snapshot = root / "snapshots" / ("a" * 40)
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("a" * 40)
    for folder in folders:
        (snapshot / folder).mkdir(parents=True)
        (snapshot / folder / "config.json").write_text("{}")
        (snapshot / folder / ("tokenizer.json" if folder == "tokenizer" else "model.safetensors")).write_text("{}")
    return snapshot


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))})


@pytest.mark.parametrize(
    "there",
    [
        {},
        {"config.json": "{}"},
        {"model.safetensors": ""},
        {"config.json": "{}", SHARDS[0]: ""},
        {"config.json": "{}", SHARDS[0]: "", "model.safetensors.index.json": INDEX},
    ],
)
def test_an_interrupted_download_is_not_taken_for_complete(tmp_path, cache, there):
    folder = cache_repository(cache, HUB, "text_encoder") / "text_encoder"
    for file in folder.iterdir():
        file.unlink()
    for name, text in there.items():
        (folder / name).write_text(text)
    with pytest.raises(ValueError, match="not downloaded yet"):
        weights.resolve("", tmp_path, family("klein-base-4b"), ["text_encoder"], fetch=False)
    for name, text in {"config.json": "{}", SHARDS[0]: "", SHARDS[1]: "", "model.safetensors.index.json": INDEX}.items():
        (folder / name).write_text(text)
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert weights.resolve("", tmp_path, family("klein-base-4b"), ["text_encoder"], fetch=False) == folder.parent


def test_a_full_disk_is_reported_with_the_folder(tmp_path, monkeypatch):
    def snapshot_download(name, *, allow_patterns, local_files_only=False, dry_run=False):
        raise errors.LocalEntryNotFoundError("not there") if local_files_only else OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ValueError, match=r"cannot be written to .*No space left on device; free space there"):
        weights.resolve("", tmp_path, family("klein-base-4b"))


def test_a_seeded_familys_weights_are_generated_once_if_that_is_allowed(tmp_path):
    record = family("tiny")
    with pytest.raises(ValueError, match="is not generated yet"):
        weights.resolve("", tmp_path, record, fetch=False)
    assert list(tmp_path.iterdir()) == []
    folder = weights.resolve("", tmp_path, record)
    assert folder == tmp_path / "weights" / "tiny"
    for component in ("transformer", "autoencoder", "text_encoder", "tokenizer"):
        assert locate(folder, component, record).is_dir()
    assert [p.name for p in (tmp_path / "weights").iterdir()] == ["tiny"]
    assert weights.resolve("", tmp_path, dataclasses.replace(record, code="tests:cannot_write")) == folder


def write_half(folder, family, seed):
    (folder / "model_index.json").write_text(json.dumps({}))
    raise OSError(28, "No space left on device")


HALF = dataclasses.replace(FLUX2, write_random_weights=write_half)


def test_weights_that_were_not_generated_completely_do_not_appear(tmp_path):
    with pytest.raises(OSError, match="No space"):
        weights.resolve("", tmp_path, dataclasses.replace(family("tiny"), code=f"{__name__}:HALF"))
    assert list((tmp_path / "weights").iterdir()) == []


@pytest.fixture
def bundled(tmp_path, tiny_weights, monkeypatch):
    monkeypatch.setattr(weights, "CHECKOUT", tmp_path / "checkout")
    folder = tmp_path / "checkout" / "data" / "small"
    shutil.copytree(tiny_weights, folder)
    return dataclasses.replace(family("tiny"), seeded=None, bundled="data/small"), folder


WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize(
    ("component", "name", "cut", "said"),
    [
        ("transformer", f"transformer/{WEIGHTS}", None, "there are no weights in data/small/transformer"),
        ("transformer", f"transformer/{WEIGHTS}", 10_000, f"data/small/transformer/{WEIGHTS} is cut short: 10,000 bytes"),
        ("autoencoder", "vae/config.json", None, "data/small/vae/config.json is missing"),
        ("text_encoder", "text_encoder/config.json", 20, "data/small/text_encoder/config.json is damaged: not valid JSON"),
        ("tokenizer", "tokenizer/tokenizer.json", 20_000, "data/small/tokenizer/tokenizer.json is damaged: not valid JSON"),
        ("tokenizer", "tokenizer/chat_template.jinja", None, "data/small/tokenizer/chat_template.jinja is missing"),
    ],
)
def test_a_bundled_file_that_is_missing_or_cut_is_named_with_the_command_that_restores_it(
    tmp_path, bundled, component, name, cut, said
):
    record, folder = bundled
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:cut]) if cut else (folder / name).unlink()
    with pytest.raises(ValueError) as caught:
        weights.resolve("", tmp_path, record, (component,))
    message = str(caught.value)
    assert message.startswith(said) and "\n" not in message and "fetch" not in message
    assert f"it is part of the checkout; run `git checkout data/small` in {tmp_path / 'checkout'} to restore it" in message
    others = [each for each in FOLDERS if each != component]
    assert weights.resolve("", tmp_path, record, others) == folder


def quantised(source: Path, folder: Path) -> Path:
    folder.mkdir()
    stored, _ = checkpoints.quantised(mx.load(str(source / "model.safetensors")), 4, 32)
    config = json.loads((source / "config.json").read_text()) | {"quantization": {"group_size": 32, "bits": 4}}
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
    projects.edit(without, "commit_seconds", 'components = { text_encoder = "../apart" }\ncommit_seconds')
    stages = ("images", "captions", "embeddings")
    for folder in (one, without):
        projects.build(folder, *stages)
    assert projects.content(one, "embeddings") == projects.content(without, "embeddings")
    assert Project(one).recipe("embeddings") == Project(without).recipe("embeddings")


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
