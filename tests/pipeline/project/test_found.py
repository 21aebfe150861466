"""`latentmill families --found` on sparse files with the names and shapes of released models."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.commands.families import command
from pipeline.project.found import complete_roots, search
from stages.models.family import FOLDERS
from stages.models.flux2.autoencoder import AutoencoderConfig
from stages.text_to_image.families import FAMILIES, family
from tests import checkpoints

KLEIN, DEV = family("klein-base-4b"), family("dev")
PUBLISHED = {name: record for name, record in FAMILIES.items() if record.hub}
Shapes = dict[str, tuple[int, ...]]


def sparse(path: Path, shapes: Shapes, dtype: str = "BF16") -> None:
    header, at = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape) * {"BF16": 2, "F8_E4M3": 1}[dtype]
        header[name], at = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}, at + size
    head = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + at)


def transformer(record: object = KLEIN) -> Shapes:
    return dict(KLEIN.architecture.transformer_config(None, record).shapes())


def text_encoder(prefix: str = "model.") -> Shapes:
    return {prefix + name: shape for name, shape in KLEIN.architecture.text_encoder_sizes(None, KLEIN).shapes(27).items()}


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """klein base 4B in the hub's cache, complete, with its transformer in two shards."""
    root = tmp_path / "hub" / "models--black-forest-labs--FLUX.2-klein-base-4B" / "snapshots" / ("a" * 40)
    names = transformer()
    half = len(names) // 2
    for n, part in enumerate((list(names)[:half], list(names)[half:]), 1):
        file = root / "transformer" / f"diffusion_pytorch_model-{n:05d}-of-00002.safetensors"
        sparse(file, {name: names[name] for name in part})
    sparse(root / "vae" / "diffusion_pytorch_model.safetensors", AutoencoderConfig.from_dict(KLEIN.autoencoder).shapes())
    sparse(root / "text_encoder" / "model.safetensors", text_encoder())
    (root / "tokenizer").mkdir()
    return root


def test_components_of_a_cached_model_are_recognised_by_content_and_a_whole_model_is_offered(snapshot: Path) -> None:
    for path in list(snapshot.rglob("*.safetensors")):
        path.rename(path.with_name(path.name.replace("model", "renamed")))  # names tell nothing
    found = list(search(snapshot.parents[2], PUBLISHED))
    by_component = {each.component: each for each in found}
    assert len(found) == len(by_component) == 3 and {(each.form, each.missing) for each in found} == {("BF16", "")}
    assert by_component["transformer"].families == ("klein-base-4b", "klein-4b")
    same = tuple(name for name, record in PUBLISHED.items() if record.autoencoder == KLEIN.autoencoder)
    assert by_component["autoencoder"].families == same
    assert 7.75e9 < by_component["transformer"].size < 7.76e9 and by_component["transformer"].path.name == "transformer"
    roots = list(complete_roots(found, PUBLISHED))
    assert roots == [("klein-base-4b", snapshot), ("klein-4b", snapshot)]
    other_order = {KLEIN.name: dataclasses.replace(KLEIN, folders={"tokenizer": "tokenizer", **FOLDERS})}
    assert list(complete_roots(found, other_order)) == [(KLEIN.name, snapshot)]


def test_qwen3_and_the_text_part_of_qwen3_vl_are_offered_to_those_that_read_them(tmp_path: Path) -> None:
    sizes = dict(family("flux3-klein-base").text_encoder)
    for folder, prefix, config in (
        ("whole", "model.language_model.", {"model_type": "qwen3_vl", "text_config": sizes}),
        ("part", "model.", sizes),
        ("qwen3", "model.", dict(KLEIN.text_encoder)),
        ("unsaid", "model.", {}),
        ("told", "language_model.model.", {}),
    ):
        sparse(tmp_path / folder / "model.safetensors", text_encoder(prefix))
        if config:
            (tmp_path / folder / "config.json").write_text(json.dumps(config))
    found = {each.path.parent.name: set(each.families) for each in search(tmp_path, PUBLISHED)}
    vl, qwen3 = {"flux3-klein-base", "flux3-klein"}, {"klein-base-4b", "klein-4b", "z-image", "z-image-turbo"}
    assert found == {"whole": vl, "part": vl, "told": vl, "qwen3": qwen3, "unsaid": qwen3}


def test_what_is_missing_is_said_and_nothing_incomplete_is_offered(snapshot: Path) -> None:
    next((snapshot / "transformer").glob("*-00002-*")).unlink()
    file = snapshot / "text_encoder" / "model.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1)
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir()
    (blobs / "c0ffee.incomplete").write_bytes(bytes(5))
    found = list(search(snapshot.parents[2], PUBLISHED))
    missing = {each.component: each.missing for each in found}
    assert missing["transformer"] == "1 of 2 shards" and missing["download"] == "interrupted: the stage fetches it again"
    assert "text_encoder" not in missing  # its name tells nothing, and its header cannot be trusted
    assert list(complete_roots(found, PUBLISHED)) == []


def test_single_files_of_comfyui_are_listed_with_their_precision_and_their_size(tmp_path: Path) -> None:
    import torch

    shapes = {name: torch.empty(shape, device="meta") for name, shape in transformer(DEV).items()}
    plain = {name: tuple(value.shape) for name, value in checkpoints.as_single_file(shapes, "model.diffusion_model.").items()}
    sparse(tmp_path / "models" / "diffusion_models" / "flux2-dev.safetensors", plain, "F8_E4M3")
    sparse(tmp_path / "models" / "text_encoders" / "qwen.safetensors", text_encoder())
    sparse(tmp_path / "models" / "loras" / "any.safetensors", {"lora_unet_a.lora_down.weight": (4, 8)})
    shown = CliRunner().invoke(command, ["--found", "--in", str(tmp_path)], catch_exceptions=False).output
    head, *body = shown.splitlines()
    assert head.split() == ["component", "of", "GB", "form", "missing", "path"]
    assert [line.split()[:4] for line in body[:1]] == [["transformer", "dev", "32.2", "F8_E4M3"]]
    assert body[1].startswith("text_encoder  klein-base-4b, klein-4b") and body[2].startswith("2 components, ")
