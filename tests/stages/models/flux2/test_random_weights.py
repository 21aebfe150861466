"""The tiny model: whole, the same everywhere, loadable by diffusers and by us, sane in its numbers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from stages.models.flux2 import load, random_weights
from stages.models.flux2.autoencoder import Autoencoder, AutoencoderConfig, load_autoencoder
from stages.models.flux2.transformer import image_ids, text_ids
from stages.models.folders import locate
from stages.models.text.encoder import TextEncoder, widen
from stages.text_to_image.families import family
from tests.stages.models.test_gguf import file_of

TINY = family("tiny")


def digests(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def autoencoder(folder: Path) -> Autoencoder:
    return load_autoencoder(locate(folder, "autoencoder", TINY), TINY, mx.float32)


def smooth(count: int) -> mx.array:
    """Pictures of soft blobs, (count,128,128,3), -1 to 1: neighbouring pixels agree, as in photographs."""
    rng = np.random.default_rng(0)
    x, y = np.meshgrid(np.arange(128), np.arange(128))
    waves = np.zeros((count, 128, 128, 3))
    for picture in waves:
        for size in (64, 32, 16, 8):
            fx, fy, phase, strength = rng.uniform(-1, 1, (4, 3))
            picture += strength * np.sin(6.28 * (x[..., None] * fx + y[..., None] * fy) / size + 6.28 * phase)
    return mx.array(np.clip(waves, -1, 1), mx.float32)


def test_one_seed_gives_the_same_bytes_and_another_does_not(tiny_weights: Path, tmp_path: Path) -> None:
    TINY.architecture.write_random_weights(tmp_path / "again", TINY, 0)
    assert digests(tmp_path / "again") == digests(tiny_weights)
    TINY.architecture.write_random_weights(tmp_path / "other", TINY, 1)
    differing = {name for name, digest in digests(tmp_path / "other").items() if digest != digests(tiny_weights)[name]}
    assert differing == {name for name in digests(tiny_weights) if name.endswith(".safetensors")}


def test_random_weights_are_equal_on_every_machine() -> None:
    values = random_weights.weight("transformer.proj_out.weight", (128, 64), 0)
    assert hashlib.sha256(values.tobytes()).hexdigest()[:16] == "4d85ff08bd6099f8"


def test_diffusers_loads_random_weights_and_knows_every_tensor(tiny_weights: Path) -> None:
    from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Transformer2DModel
    from transformers import Qwen3ForCausalLM

    pipeline = Flux2KleinPipeline.from_pretrained(tiny_weights)
    assert not pipeline.config.is_distilled
    assert type(pipeline.tokenizer).__name__.startswith("Qwen2Tokenizer")
    parts = {"transformer": Flux2Transformer2DModel, "vae": AutoencoderKLFlux2, "text_encoder": Qwen3ForCausalLM}
    for part, kind in parts.items():
        _, said = kind.from_pretrained(tiny_weights / part, output_loading_info=True)
        assert not said["missing_keys"] and not said["unexpected_keys"] and not said["mismatched_keys"], part


def test_diffusers_draws_an_image_with_random_weights(tiny_weights: Path) -> None:
    from diffusers import Flux2KleinPipeline

    pipeline = Flux2KleinPipeline.from_pretrained(tiny_weights)
    pipeline.set_progress_bar_config(disable=True)
    drawn = pipeline(
        prompt="a cat",
        height=64,
        width=64,
        num_inference_steps=2,
        output_type="np",
        max_sequence_length=TINY.text_tokens,
        text_encoder_out_layers=TINY.text_layers,
    ).images[0]
    assert drawn.shape == (64, 64, 3)
    assert np.isfinite(drawn).all() and drawn.std() > 0.05


def test_the_tokenizer_decodes_what_it_encodes(tiny_weights: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_weights / "tokenizer")
    text = "Two foxes 🦊 on a café table;\n\n狐, 3d <think>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.tokenize("a photo of a cat")[1:] == ["Ġphoto", "Ġof", "Ġa", "Ġcat"]
    assert len(tokenizer) <= json.loads((tiny_weights / "text_encoder" / "config.json").read_text())["vocab_size"]


def test_random_latents_have_about_unit_variance_and_decode_to_visible_images(tiny_weights: Path) -> None:
    model = autoencoder(tiny_weights)
    latents = model.encode(smooth(4))
    assert 0.6 < float(latents.std()) < 1.6
    assert abs(float(latents.mean())) < 0.3
    drawn = model.decode(mx.random.normal(latents.shape, key=mx.random.key(0)))
    assert 0.1 < float(drawn.std()) < 1.0
    assert float((mx.abs(drawn) < 1).mean()) > 0.9


def test_a_random_velocity_is_of_the_size_of_noise_and_depends_on_every_input(tiny_weights: Path) -> None:
    encoder = TextEncoder(locate(tiny_weights, "text_encoder", TINY), locate(tiny_weights, "tokenizer", TINY), TINY, "float32")
    one, two = (mx.array(widen(made.words))[None] for made in encoder.encode(["a cat", "a red boat"]))
    model = load.load_flux2(locate(tiny_weights, "transformer", TINY), TINY, mx.float32)
    noise = mx.random.normal((1, 48, 128), key=mx.random.key(0))

    def velocity(text: mx.array, sigma: float) -> mx.array:
        return model(noise, image_ids(6, 8), text, text_ids(TINY.text_tokens), mx.array([sigma]))

    base = velocity(one, 0.5)
    assert 0.3 < float(base.std()) < 2
    assert float(mx.abs(velocity(two, 0.5) - base).mean()) > 0.01
    assert float(mx.abs(velocity(one, 0.9) - base).mean()) > 0.05


def test_an_autoencoder_as_gguf_without_a_config_is_read_with_the_widths_of_its_decoder(
    tiny_weights: Path, tmp_path: Path
) -> None:
    widths = {"block_out_channels": (8, 16, 16, 16), "decoder_block_out_channels": (4, 8, 12, 16)}
    record = replace(TINY, autoencoder={**TINY.autoencoder, **widths})
    shapes = AutoencoderConfig.from_dict(record.autoencoder).shapes()
    arrays = {name: random_weights.weight(f"vae.{name}", shape, 0) for name, shape in shapes.items()}
    tensors = [(name, value.shape, 0, value.tobytes()) for name, value in arrays.items()]
    (tmp_path / "ae.gguf").write_bytes(file_of(tensors))
    read = load_autoencoder(tmp_path / "ae.gguf", TINY, mx.float32)
    assert read.config.decoder_channels == widths["decoder_block_out_channels"]
    assert np.array_equal(
        np.array(read.weights["decoder.conv_in.weight"]).transpose(0, 3, 1, 2), arrays["decoder.conv_in.weight"]
    )
