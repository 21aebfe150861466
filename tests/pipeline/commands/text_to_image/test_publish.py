"""`latentmill publish` prepares a folder for the hub: complete, without private paths, and never uploaded."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from pipeline.api import Project
from pipeline.commands.text_to_image.publish import CARD, GRID, SETTINGS, WEIGHTS, publish
from stages.models.weights import read_file
from tests import projects

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> Path:
    folder = projects.make(tmp_path_factory.mktemp("publish") / "cats", tiny_weights, images=2)
    projects.edit(folder, "[captions]", '[captions]\ntrigger = "ohwx \\"|cat"\ntemplate = "{trigger}, {caption}"')
    projects.edit(folder, '"a red thing"', '"{trigger}, a red: thing"')
    projects.build(folder, "images", "captions", "buckets", "latents", "embeddings", "train", "samples")
    return folder


def test_the_folder_has_a_card_settings_previews_and_weights_that_diffusers_loads_and_names_no_path_of_this_machine(
    built, tmp_path, monkeypatch
):
    from diffusers.loaders import Flux2LoraLoaderMixin
    from huggingface_hub import ModelCard

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("publish reached for the network")

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        folder = publish(Project(built), tmp_path / "hub", dtype="float32", data_licence="CC-BY-4.0, my own photographs")
    assert {path.name for path in folder.iterdir()} == {CARD, GRID, SETTINGS, WEIGHTS}
    about = read_file(folder / WEIGHTS)[1]
    assert about["modelspec.trigger_phrase"] == 'ohwx "|cat' and about["modelspec.resolution"] == "96x96"
    text = (folder / CARD).read_text()
    assert "CC-BY-4.0, my own photographs" in text and "trained for 6 steps on 2 images" in text and f"]({GRID})" in text
    assert json.loads((folder / SETTINGS).read_text())["train.rank"] == 2 and "| `train.rank` | `2` |" in text
    for file in (CARD, SETTINGS):
        assert str(built) not in (folder / file).read_text() and "/tmp" not in (folder / file).read_text()
    assert str(built) not in json.dumps(about)
    header = ModelCard.load(folder / CARD).data.to_dict()  # YAML that the hub reads
    assert header["instance_prompt"] == 'ohwx "|cat' and header["license"] == "apache-2.0"
    assert header["widget"][0]["text"] == 'ohwx "|cat, a red: thing' and header["widget"][0]["output"]["url"] == GRID
    found = Flux2LoraLoaderMixin.lora_state_dict(str(folder), weight_name=WEIGHTS)
    assert found and all(key.startswith("transformer.") for key in found)
    assert "from_pretrained('FOLDER OF THE BASE'," in text  # tiny has no weights that can be had


def test_the_command_says_that_nothing_was_uploaded_and_overwrites_nothing(built):
    said = projects.latentmill(built, "publish")
    assert "nothing was uploaded" in said and "--data-licence" in said
    assert re.search(r"exports/\S*-hub exists; move it away", projects.latentmill(built, "publish", code=2))
