"""Where components lie, and sizes in a foreign config.json: wrong types and absurd values are one line."""

from __future__ import annotations

import pytest

from stages.models.flux2.autoencoder import AutoencoderConfig
from stages.models.flux2.transformer import Flux2Config
from stages.models.flux3.transformer import Flux3Config
from stages.models.folders import locate
from stages.models.t5.model import T5Config
from stages.models.text.decoder import Qwen3Config
from stages.models.z_image.transformer import ZImageConfig
from stages.text_to_image.families import family


def test_a_single_file_is_found_under_either_spelling_with_its_precision_in_its_name_or_the_names_looked_for_are_said(tmp_path):
    klein = family("klein-4b")
    for name in ("flux-2-klein-base-4b.safetensors", "flux-2-klein-4b-nvfp4.safetensors", "qwen_3_4b_fp8_mixed.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"looked for transformer/, flux-2-klein-4b\.safetensors") as caught:
        locate(tmp_path, "transformer", klein)
    assert str(tmp_path) in str(caught.value)
    (tmp_path / "flux-2-klein-4b-fp8.safetensors").touch()
    assert locate(tmp_path, "transformer", klein).name == "flux-2-klein-4b-fp8.safetensors"
    assert locate(tmp_path, "text_encoder", klein).name == "qwen_3_4b_fp8_mixed.safetensors"
    assert locate(tmp_path, "transformer", family("klein-base-4b")).name == "flux-2-klein-base-4b.safetensors"
    (tmp_path / "other").mkdir()
    for name in ("Qwen3-4B-Q4_K_M.gguf", "flux2-klein-4b.safetensors"):
        (tmp_path / "other" / name).touch()
    assert locate(tmp_path / "other", "text_encoder", klein).name == "Qwen3-4B-Q4_K_M.gguf"
    assert locate(tmp_path / "other", "transformer", klein).name == "flux2-klein-4b.safetensors"
    (tmp_path / "flux-2-klein-4b_bf16.safetensors").touch()
    with pytest.raises(ValueError, match=r"has flux-2-klein-4b-fp8\.\w+ and flux-2-klein-4b_bf16\.\w+: remove one"):
        locate(tmp_path, "transformer", klein)


TINY = family("tiny")
FLUX3 = family("flux3-tiny").transformer | {"attention_head_dim": 32, "axes_dims_rope": [8, 8, 8, 8]}
Z_IMAGE = family("z-image-tiny").transformer | {"dim": 64, "n_heads": 2, "n_kv_heads": 2, "axes_dims": [8, 12, 12]}
T5 = {"vocab_size": 9, "d_model": 8, "d_kv": 4, "d_ff": 9, "num_layers": 1, "num_heads": 2}


@pytest.mark.parametrize(
    ("kind", "content", "wrong", "said"),
    [
        (Flux2Config, TINY.transformer, {"num_layers": 10**9}, "num_layers must be a whole number from 0 to 1000, got 10000"),
        (Flux2Config, TINY.transformer, {"rope_theta": 0}, "rope_theta must be a number from 1 to 1e"),
        (Flux2Config, TINY.transformer, {"axes_dims_rope": [7, 9, 8, 8]}, "axes_dims_rope must be even numbers"),
        (Flux2Config, TINY.transformer, {"axes_dims_rope": [8, 8, 8, 10]}, "must add up to attention_head_dim"),
        (Flux3Config, FLUX3, {"eps": 1e-5}, "eps must be 1e-06, got 1e-05"),
        (Flux3Config, FLUX3, {"cond_in_channels": 8}, "cond_in_channels must be in_channels, .*, got 8"),
        (Flux3Config, FLUX3, {"axes_dims_rope": [16, 16]}, "must have 4 numbers, got (16, 16)"),
        (Flux3Config, FLUX3, {"axes_dims_rope": [8, 8, 8, 10]}, "(8, 8, 8, 10) must add up to attention_head_dim 32"),
        (ZImageConfig, Z_IMAGE, {"norm_eps": 1e-6}, "norm_eps must be 1e-05, got 1e-06"),
        (ZImageConfig, Z_IMAGE, {"n_kv_heads": 1}, "n_kv_heads = n_heads, .* got 1 and 2"),
        (ZImageConfig, Z_IMAGE, {"axes_dims": [8, 8, 8]}, "even and add up to dim / n_heads, got (8, 8, 8), 64 and 2"),
        (AutoencoderConfig, TINY.autoencoder, {"block_out_channels": [8] * 1000}, "must be a list of 1 to 16 sizes"),
        (AutoencoderConfig, TINY.autoencoder, {"block_out_channels": [9, 16, 16, 16]}, "multiples of norm_num_groups 4, got 9"),
        (AutoencoderConfig, TINY.autoencoder, {"act_fn": "relu"}, "is not supported; expected"),
        (AutoencoderConfig, TINY.autoencoder, {"patch_size": [4, 4]}, "is not supported; expected"),
        (Qwen3Config, TINY.text_encoder, {"num_key_value_heads": 3}, "num_attention_heads a multiple of num_key_value_heads"),
        (Qwen3Config, TINY.text_encoder, {"rope_theta": 0}, "rope_theta must be a number"),
        (Qwen3Config, TINY.text_encoder, {"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        (Qwen3Config, TINY.text_encoder, {"attention_bias": True}, "attention_bias"),
        (T5Config, T5, {"d_kv": ..., "num_heads": ...}, "lacks d_kv, num_heads; is it a T5 model"),
        (T5Config, T5, {"feed_forward_proj": "gated-silu"}, "must be relu or gated-gelu, got 'gated-silu'"),
        (
            T5Config,
            T5,
            {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"},
            "dense_act_fn of the encoder must be gelu_new with gated-gelu, got 'gelu'",
        ),
    ],
)
def test_a_config_that_lacks_a_size_contradicts_itself_or_would_change_the_computation_is_refused(kind, content, wrong, said):
    with pytest.raises(ValueError, match=said.replace("(", "\\(").replace(")", "\\)")):
        kind.from_dict({name: value for name, value in (content | wrong).items() if value is not ...})
