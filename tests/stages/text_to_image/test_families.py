import dataclasses
from pathlib import Path

import pytest

from stages.models.family import FOLDERS
from stages.text_to_image.families import FAMILIES, family

ROOT = Path(__file__).parents[3]


def test_a_family_is_found_by_its_name():
    assert family("klein-base-4b").hub == "black-forest-labs/FLUX.2-klein-base-4B"
    assert all(name == record.name for name, record in FAMILIES.items())


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(ValueError, match=r"no family 'klein-bse-4b'; did you mean 'klein-base-4b'\?"):
        family("klein-bse-4b")


def test_a_record_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        family("tiny").guidance = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("record", FAMILIES.values(), ids=lambda f: f.name)
def test_the_text_features_of_a_family_are_its_chosen_hidden_states_side_by_side(record):
    assert record.transformer["joint_attention_dim"] == len(record.text_layers) * record.text_encoder["hidden_size"]
    assert max(record.text_layers) <= record.text_encoder["num_hidden_layers"]


@pytest.mark.parametrize("record", FAMILIES.values(), ids=lambda f: f.name)
def test_a_familys_weights_are_published_or_bundled_or_made_from_a_seed(record):
    assert sum((bool(record.hub), bool(record.bundled), record.seeded is not None)) == 1
    assert record.source
    assert not record.gated or record.hub


@pytest.mark.parametrize("record", [f for f in FAMILIES.values() if f.bundled], ids=lambda f: f.name)
def test_a_bundled_family_lies_in_the_checkout_with_all_its_components_and_a_model_card(record):
    for folder in FOLDERS.values():
        assert any((ROOT / record.bundled / folder).glob("*.json")), folder
    assert (ROOT / record.bundled / "README.md").is_file()


@pytest.mark.parametrize("record", FAMILIES.values(), ids=lambda f: f.name)
def test_the_sizes_of_a_family_fit_each_other(record):
    transformer, autoencoder = record.transformer, record.autoencoder
    assert sum(transformer["axes_dims_rope"]) == transformer["attention_head_dim"]
    packed = autoencoder["latent_channels"] * autoencoder["patch_size"][0] * autoencoder["patch_size"][1]
    assert packed == transformer["in_channels"]
    widths = (*autoencoder["block_out_channels"], *(autoencoder["decoder_block_out_channels"] or ()))
    assert all(width % autoencoder["norm_num_groups"] == 0 for width in widths)
    assert record.text_encoder["num_attention_heads"] % record.text_encoder["num_key_value_heads"] == 0


@pytest.mark.parametrize("record", FAMILIES.values(), ids=lambda f: f.name)
def test_guidance_enters_one_way_only(record):
    assert not (record.guidance_embedded and record.real_cfg)
    assert record.guidance_embedded == record.transformer["guidance_embeds"]
    assert record.real_cfg or record.guidance_embedded or record.guidance == 1.0


@pytest.mark.parametrize("name", ["klein-4b", "klein-9b", "dev"])
def test_the_transformers_have_the_released_number_of_bytes(name):
    from stages.models.flux2.config import Flux2Config

    shapes = Flux2Config.from_dict(family(name).transformer).shapes()
    parameters = 0
    for shape in shapes.values():
        size = 1
        for side in shape:
            size *= side
        parameters += size
    assert 2 * parameters == family(name).bytes_bf16["transformer"]
