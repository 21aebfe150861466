"""Mistral Small 3's text part against transformers' Mistral3 and diffusers' FLUX.2 pipeline, at small sizes in float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from stages.models.text import tokenisation
from stages.models.text.decoder import Decoder, Mistral3Config
from stages.models.text.encoder import TextEncoder, widen
from stages.text_to_image.families import family
from tests import checkpoints
from tests.checkpoints import HIDDEN

DEV = family("dev")
EDGE = 512 - len(tokenisation.SYSTEM_MESSAGE) - 5  # letters of a prompt that fills 512 tokens exactly, a token for each letter
TEXTS = ["", "[INST] Füchse, 狐 🦊\nand\ttabs  an [IMG] in it </s>", "x" * EDGE, "word " * 90]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text encoder and the tokenizer of a small FLUX.2 dev, as transformers saves them."""
    made = tmp_path_factory.mktemp("dev")
    checkpoints.mistral_encoder().save_pretrained(made / "text_encoder")
    checkpoints.mistral_tokenizer().save_pretrained(made / "tokenizer")
    return made


def encoder(folder: Path, **options: Any) -> TextEncoder:
    return TextEncoder(folder / "text_encoder", folder / "tokenizer", DEV, "float32", **options)


def of_diffusers(folder: Path, texts: list[str]) -> np.ndarray:
    import torch
    from diffusers import Flux2Pipeline
    from transformers import AutoTokenizer, Mistral3ForConditionalGeneration

    model = Mistral3ForConditionalGeneration.from_pretrained(folder / "text_encoder").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    with torch.no_grad():
        found: np.ndarray = Flux2Pipeline._get_mistral_3_small_prompt_embeds(model, tokenizer, texts).numpy()
    return found


def test_embeddings_are_those_of_diffusers_with_zeros_for_the_padding_before_the_real_rows(folder: Path) -> None:
    theirs = of_diffusers(folder, TEXTS)
    found = list(encoder(folder).encode(TEXTS))
    mine = np.stack([widen(made.words) for made in found])
    assert mine.shape == (len(TEXTS), 512, 3 * HIDDEN) and np.abs(theirs).max() > 1
    np.testing.assert_allclose(mine, theirs, atol=1e-4, rtol=2**-8)  # half of bfloat16's last place
    assert [made.dropped > 0 for made in found] == [False] * 3 + [True]
    assert found[2].tokens == 512 and found[0].first == 512 - found[0].tokens > 0
    for made, rows in zip(found, mine, strict=True):
        assert not rows[: made.first].any() and (np.abs(rows[made.first :]).max(-1) > 0).all()
        np.testing.assert_array_equal(widen(made.real), rows[made.first :])


def test_hidden_states_of_a_batch_are_those_of_transformers_also_if_the_padding_token_is_not_zero() -> None:
    import torch

    model = checkpoints.mistral_encoder()
    with torch.no_grad():
        model.model.language_model.embed_tokens.weight[11] = 0.5
    tokens = np.random.default_rng(1).integers(20, 270, (3, 24))
    real = np.arange(24)[None] >= np.array([17, 0, 23])[:, None]
    tokens = np.where(real, tokens, 11)
    with torch.no_grad():
        given = {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(real.astype(np.int64))}
        states = model(**given, output_hidden_states=True).hidden_states
    theirs = np.concatenate([states[k].numpy() for k in DEV.text_layers], axis=-1)
    mine = decoder(model).encode(mx.array(tokens), mx.array(real), DEV.text_layers)
    np.testing.assert_allclose(np.array(mine), theirs, atol=1e-4, rtol=1e-4)


def decoder(model: Any) -> Decoder:
    """Our decoder with the weights of transformers' model."""
    config = Mistral3Config.from_dict(model.config.to_dict())
    named = {config.weight_name(key): value.numpy() for key, value in model.state_dict().items()}
    shapes = config.shapes(max(DEV.text_layers))
    return Decoder(config, {name: mx.array(named[name]) for name in shapes})


def test_every_spelling_of_the_names_is_read_and_a_tensor_in_two_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "text_encoder" / "model.safetensors"
    arrays = {key: mx.array(value) for key, value in mx.load(str(file)).items()}
    expected = next(encoder(folder).encode(["a cat"])).words
    for spelling in ("model.language_model.", "model.", ""):
        kept = {key: value for key, value in arrays.items() if spelling.count(".") == 2 or key.startswith("language_model")}
        renamed = {key.replace("language_model.model.", spelling): value for key, value in kept.items()}
        if spelling.count(".") == 2:
            renamed = {key if "language" in key else f"model.{key}": value for key, value in renamed.items()}
        mx.save_safetensors(str(file), renamed)
        np.testing.assert_array_equal(next(encoder(tmp_path).encode(["a cat"])).words, expected, spelling)
    mx.save_safetensors(str(tmp_path / "text_encoder" / "more.safetensors"), {"model.norm.weight": mx.ones(HIDDEN)})
    with pytest.raises(ValueError, match=r"holds (model\.)?norm\.weight and (model\.)?norm\.weight, two spellings"):
        encoder(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sliding_window": 4096}, "sliding_window = 4096, which this family's Mistral Small 3 does not have"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
)
def test_another_architecture_is_refused_with_the_field(change: dict[str, Any], said: str, folder: Path) -> None:
    config = json.loads((folder / "text_encoder" / "config.json").read_text())
    with pytest.raises(ValueError, match=said):
        Mistral3Config.from_dict(config | {"text_config": config["text_config"] | change})
