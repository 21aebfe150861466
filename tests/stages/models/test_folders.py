import pytest

from stages.models.folders import locate, read_config
from stages.text_to_image.families import family


@pytest.mark.parametrize("component", ["transformer", "autoencoder", "text_encoder", "tokenizer"])
def test_a_component_is_found_in_its_folder(tmp_path, component):
    folder = tmp_path / {"autoencoder": "vae"}.get(component, component)
    folder.mkdir()
    assert locate(tmp_path, component, family("klein-base-4b")) == folder


@pytest.mark.parametrize("name", ["flux-2-klein-base-4b.safetensors", "flux2-klein-base-4b.safetensors"])
def test_a_single_file_is_found_under_either_spelling(tmp_path, name):
    (tmp_path / name).touch()
    assert locate(tmp_path, "transformer", family("klein-base-4b")) == tmp_path / name


def test_a_missing_component_is_reported_with_the_names_looked_for(tmp_path):
    with pytest.raises(ValueError, match=r"looked for transformer/, flux-2-klein-base-4b\.safetensors") as caught:
        locate(tmp_path, "transformer", family("klein-base-4b"))
    assert str(tmp_path) in str(caught.value)


def test_a_broken_config_file_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        read_config(tmp_path)
