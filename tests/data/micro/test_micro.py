"""The bundled family in data/assets/micro: its size, its record, and diffusers, which draws the same pictures with it."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pipeline.commands.text_to_image.export import write_adapter
from schemas.text_to_image import TRAIN
from stages.models import sampling
from stages.models.adapters import B
from stages.models.flux2.autoencoder import AutoencoderConfig, load_autoencoder
from stages.models.flux2.load import load_flux2
from stages.models.flux2.transformer import Flux2Config
from stages.models.folders import read_config
from stages.models.text.decoder import Qwen3Config
from stages.models.text.encoder import TextEncoder, widen
from stages.text_to_image.families import family
from stages.text_to_image.sampler import Adapters, adapted_forward, read_adapters
from stages.tuner import checkpoint
from stages.tuner.adapters.targets import fresh_adapter, select_targets
from tests.harness import writer_into

MICRO = family("micro")
FOLDER = Path(__file__).parents[3] / "data" / "assets" / "micro"
CARD = (FOLDER / "README.md").read_text(encoding="utf-8")
MOST = 28_000_000  # largest size of the folder, bytes
APPLE, OWL = "a red apple on a blue background", "an owl on a yellow background"
TEXTS = (APPLE, OWL, "")
DRAWN = ((APPLE, (128, 128)), (OWL, (96, 160)))  # texts, and the height and width of their pictures
BLUE, YELLOW = (44, 104, 216), (255, 218, 62)  # as in the training pictures
STEPS = 4
SEED = 3  # of the starting noise
NEAR = 1e-3  # largest difference of two pictures, values from 0 to 1
ULP = 2**-7  # largest relative distance between neighbouring bfloat16 numbers

Words = dict[str, np.ndarray]  # text -> bfloat16 words (T,J)
Shape = tuple[int, int]  # height and width, pixels


@pytest.fixture(scope="module")
def diffusers() -> Any:
    import torch
    from diffusers import Flux2KleinPipeline

    found = Flux2KleinPipeline.from_pretrained(FOLDER, torch_dtype=torch.float32)
    found.set_progress_bar_config(disable=True)
    return found


@pytest.fixture(scope="module")
def embeddings() -> Words:
    """The embedding of each text as the embeddings stage stores it: bfloat16 words (T,J)."""
    encoder = TextEncoder(FOLDER / "text_encoder", FOLDER / "tokenizer", MICRO, "float32")
    return {text: made.words for text, made in zip(TEXTS, encoder.encode(list(TEXTS)), strict=True)}


@pytest.fixture(scope="module")
def pictures(embeddings: Words) -> dict[str, np.ndarray]:
    return {text: by_us(embeddings, text, shape) for text, shape in DRAWN}


def by_us(words: Words, text: str, shape: Shape, adapter: Path | None = None) -> np.ndarray:
    """As the samples stage does, without rounding to bytes: (H,W,3), 0 to 1."""
    model = load_flux2(FOLDER / "transformer", MICRO, mx.float32)
    prompt, negative = (mx.array(words[t]).view(mx.bfloat16)[None] for t in (text, ""))
    adapters = Adapters("saved", files=lambda: [(adapter, 1.0)] if adapter else [])
    predict = adapted_forward(model, read_adapters(adapters, MICRO, model)) if adapter else None
    settings = {"seed": SEED, "steps": STEPS, "guidance": MICRO.guidance, "negative_1TJ": negative, "predict": predict}
    autoencoder = load_autoencoder(FOLDER / "vae", MICRO, mx.float32)
    *_, drawn = MICRO.architecture.draw(model, prompt, *shape, **settings)
    image_BHWC = autoencoder.decode(drawn)
    return np.array(mx.clip((image_BHWC[0] + 1) / 2, 0, 1))


def by_diffusers(pipeline: Any, words: Words, text: str, shape: Shape) -> np.ndarray:
    """Draw a picture with diffusers from the same embeddings and noise: (H,W,3), 0 to 1."""
    import torch

    prompt, negative = (torch.tensor(widen(words[t]))[None] for t in (text, ""))
    picture: np.ndarray = pipeline(
        prompt_embeds=prompt,
        negative_prompt_embeds=negative,
        latents=torch.tensor(np.array(noise(shape))),
        height=shape[0],
        width=shape[1],
        num_inference_steps=STEPS,
        guidance_scale=MICRO.guidance,
        output_type="np",
    ).images[0]
    return picture


def noise(shape: Shape) -> mx.array:
    return sampling.noise(SEED, (1, MICRO.transformer["in_channels"], *(side // sampling.PIXELS for side in shape)))


@pytest.mark.parametrize(("text", "shape"), DRAWN)
def test_diffusers_draws_the_picture_that_we_draw(
    diffusers: Any, embeddings: Words, pictures: dict[str, np.ndarray], text: str, shape: Shape
) -> None:
    theirs = by_diffusers(diffusers, embeddings, text, shape)
    assert pictures[text].shape == (*shape, 3)
    assert np.abs(pictures[text] - theirs).max() <= NEAR


def test_with_our_exported_lora_diffusers_draws_the_picture_that_we_draw_with_the_lora(
    diffusers: Any, embeddings: Words, pictures: dict[str, np.ndarray], tmp_path: Path
) -> None:
    shapes = Flux2Config.from_dict(MICRO.transformer).shapes()
    linears = {n.removesuffix(".weight"): s for n, s in shapes.items() if "transformer_blocks" in n and len(s) == 2}
    rng = np.random.default_rng(7)
    arrays = {
        name: mx.array(rng.normal(0, 0.2, array.shape).astype(np.float32)) if name.endswith(B) else array
        for name, array in fresh_adapter(select_targets(linears, ["*"], 4, 8.0), 7).items()
    }
    about = {"family": MICRO.name, "project": "random", "rank": "4", "alpha": "8.0"}
    saved = (
        checkpoint.save(writer_into(tmp_path), 1, arrays, {}, TRAIN.batch.empty_table(), about, {}).folder / checkpoint.ADAPTER
    )
    file = write_adapter(saved, MICRO, tmp_path / "out", "diffusers", dtype="float32", metadata={})

    text, shape = DRAWN[0]
    ours = by_us(embeddings, text, shape, saved)
    diffusers.load_lora_weights(str(file.parent), weight_name=file.name)
    try:
        theirs = by_diffusers(diffusers, embeddings, text, shape)
    finally:
        diffusers.unload_lora_weights()
    assert np.abs(ours - pictures[text]).mean() > 0.02, "the adapter must change the picture"
    assert np.abs(ours - theirs).max() <= NEAR


def test_the_embeddings_of_diffusers_are_ours_but_for_their_rounding(diffusers: Any, embeddings: Words) -> None:
    import torch

    with torch.no_grad():
        theirs, _ = diffusers.encode_prompt(
            list(TEXTS), max_sequence_length=MICRO.text_tokens, text_encoder_out_layers=MICRO.text_layers
        )
    for text, rounded in zip(TEXTS, theirs.bfloat16().float().numpy(), strict=True):
        ours = widen(embeddings[text])
        np.testing.assert_allclose(ours, rounded, rtol=ULP, atol=1e-5)  # values near 0 lose digits
        assert (ours == rounded).mean() > 0.99


def test_a_picture_has_the_background_and_the_subject_of_its_prompt(pictures: dict[str, np.ndarray]) -> None:
    for text, background in ((APPLE, BLUE), (OWL, YELLOW)):
        corners = np.stack([pictures[text][y : y + 8 or None, x : x + 8 or None] for y in (0, -8) for x in (0, -8)])
        assert np.abs(corners.mean(axis=(1, 2)) - np.array(background) / 255).max() < 0.1
    red, green, blue = pictures[APPLE][48:80, 48:80].mean(axis=(0, 1))
    assert red > 0.8 and green < 0.35 and blue < 0.35


def test_the_model_cards_code_draws_a_picture_with_the_familys_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", CARD, re.DOTALL)
    said = {name: ast.literal_eval(value) for name, value in re.findall(r"(\w+)=([\d.]+|\([\d, ]+\)),\n", code)}
    assert said["guidance_scale"] == MICRO.guidance and said["num_inference_steps"] == MICRO.sampling_steps
    assert said["max_sequence_length"] == MICRO.text_tokens and said["text_encoder_out_layers"] == MICRO.text_layers
    monkeypatch.chdir(FOLDER.parents[2])
    scope: dict[str, Any] = {}
    exec(code.replace("steps=24", "steps=1"), scope)
    assert scope["picture"].size == (said["width"], said["height"])


def test_the_training_logs_its_arguments_without_naming_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from data.research.micro import train
    from data.research.micro.journal import Journal

    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)  # other tests compute exactly
    given = {"--sprites": tmp_path / "sprites.zip", "--work": tmp_path, "--start": tmp_path / "old", "--seed": 5}
    train._set_up(train.arguments([str(word) for pair in given.items() for word in pair]), Journal(tmp_path / "log.jsonl"))
    (said,) = (json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines())
    assert said["seed"] == 5 and said["start"] == "old"
    for log in (tmp_path / "log.jsonl", FOLDER.parents[1] / "research" / "micro" / "log.jsonl"):
        assert not re.search(r"[/\\]", log.read_text(encoding="utf-8"))


def test_the_folder_is_small_and_its_files_have_the_sizes_of_the_familys_record_and_of_the_model_card() -> None:
    every = [file for file in FOLDER.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert sum(file.stat().st_size for file in every) <= MOST
    for folder, config, record in (
        ("transformer", Flux2Config, MICRO.transformer),
        ("vae", AutoencoderConfig, MICRO.autoencoder),
        ("text_encoder", Qwen3Config, MICRO.text_encoder),
    ):
        assert config.from_dict(read_config(FOLDER / folder) or {}) == config.from_dict(record)
        files = sorted((FOLDER / folder).glob("*.safetensors"))
        arrays = {name: array for file in files for name, array in mx.load(str(file)).items() if not name.startswith("bn.")}
        (row,) = (line for line in CARD.splitlines() if line.startswith(f"| `{folder}` "))
        numbers = sum(array.size for array in arrays.values()), sum(file.stat().st_size for file in files)
        assert row.endswith("| {:,} | {:,} |".format(*numbers))
