"""Where components lie, and sizes in a foreign config.json: wrong types and absurd values are one line."""

from __future__ import annotations

import pytest

from stages.models.flux2.autoencoder import AutoencoderConfig
from stages.models.flux2.transformer import Flux2Config
from stages.models.folders import locate, read_config
from stages.models.t5.model import T5Config
from stages.models.text.decoder import Qwen3Config
from stages.text_to_image.families import family


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


TINY = family("tiny")
T5 = {"vocab_size": 9, "d_model": 8, "d_kv": 4, "d_ff": 9, "num_layers": 1, "num_heads": 2}
CONFIGS = [
    (Flux2Config, TINY.transformer),
    (AutoencoderConfig, TINY.autoencoder),
    (Qwen3Config, TINY.text_encoder),
    (T5Config, T5),
]
NUMBERS = [
    (kind, content, name)
    for kind, content in CONFIGS
    for name in content
    if name in kind.__dataclass_fields__ and type(content[name]) in (int, float)
]
WRONG = (10**9 * 10**9, -1, 1e30, float("nan"), "7", None, [7], {"a": 1}, True, 10**4000)


@pytest.mark.parametrize(("kind", "content", "name"), NUMBERS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_size_of_another_type_or_an_absurd_one_is_one_line(kind, content, name):
    kind.from_dict(content)
    for wrong in WRONG:
        with pytest.raises(ValueError) as error:
            kind.from_dict({**content, name: wrong})
        assert name in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("kind", "content", "wrong", "said"),
    [
        (
            Flux2Config,
            TINY.transformer,
            {"num_layers": 10**9},
            "num_layers must be a whole number from 0 to 1000, got 10000",
        ),
        (Flux2Config, TINY.transformer, {"rope_theta": 0}, "rope_theta must be a number from 1 to 1e"),
        (Flux2Config, TINY.transformer, {"axes_dims_rope": 32}, "axes_dims_rope must be a list of 1 to 16 sizes, got 32"),
        (Flux2Config, TINY.transformer, {"axes_dims_rope": [7, 9, 8, 8]}, "axes_dims_rope must be even numbers"),
        (Flux2Config, TINY.transformer, {"axes_dims_rope": [8, 8, 8, 10]}, "must add up to attention_head_dim"),
        (Flux2Config, TINY.transformer, {"guidance_embeds": "yes"}, "guidance_embeds must be true or false, got 'yes'"),
        (AutoencoderConfig, TINY.autoencoder, {"block_out_channels": [8] * 1000}, "must be a list of 1 to 16 sizes"),
        (AutoencoderConfig, TINY.autoencoder, {"block_out_channels": [9, 16, 16, 16]}, "multiples of norm_num_groups 4, got 9"),
        (Qwen3Config, TINY.text_encoder, {"num_key_value_heads": 3}, "num_attention_heads a multiple of num_key_value_heads"),
        (Qwen3Config, TINY.text_encoder, {"rope_parameters": [1]}, "must have an object as rope_parameters"),
        (Qwen3Config, TINY.text_encoder, {"rope_theta": 0}, "rope_theta must be a number"),
    ],
)
def test_sizes_that_contradict_each_other_are_named(kind, content, wrong, said):
    with pytest.raises(ValueError, match=said.replace("(", "\\(")):
        kind.from_dict({**content, **wrong})
