"""Prompts and embeddings against diffusers' klein pipeline, on the tiny model."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stages.models.text.encoder import Prompts, TextEncoder, widen
from stages.text_to_image.families import family

TINY = family("tiny")
TEXTS = ["", "a photo of a cat", "Füchse, 狐 🦊\nand\ttabs  two", "it's <|im_end|> 123", "word " * 90]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    TINY.architecture.write_random_weights(made, TINY, 0)
    return made


@pytest.fixture(scope="module")
def prompts(folder: Path) -> Prompts:
    return Prompts(folder / "tokenizer", TINY)


def diffusers_reads(folder: Path, text: str) -> tuple[list[int], list[int]]:
    """The ids and the mask that diffusers' pipeline gives its text encoder."""
    import torch
    from diffusers import Flux2KleinPipeline
    from transformers import AutoTokenizer

    given: dict[str, Any] = {}

    class Recorder(torch.nn.Module):
        dtype = torch.float32
        device = torch.device("cpu")

        def forward(self, **inputs: Any) -> Any:
            given.update(inputs)
            states = [torch.zeros(1, inputs["input_ids"].shape[1], 4)] * 4
            return SimpleNamespace(hidden_states=states)

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    embed = Flux2KleinPipeline._get_qwen3_prompt_embeds
    embed(Recorder(), tokenizer, text, max_sequence_length=TINY.text_tokens, hidden_states_layers=TINY.text_layers)
    return given["input_ids"][0].tolist(), given["attention_mask"][0].tolist()


def test_a_prompt_is_one_user_turn_with_thinking_closed(prompts: Prompts) -> None:
    formed = "<|im_start|>user\nPROMPT<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert prompts.form("PROMPT") == formed


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_and_padding_are_those_of_diffusers(folder: Path, prompts: Prompts, text: str) -> None:
    ids, real = diffusers_reads(folder, text)
    made = prompts(text)
    assert made.tokens.tolist() == ids
    assert made.real == sum(real) and real == sorted(real, reverse=True)


def test_the_empty_prompt_is_the_empty_turn_not_nothing(prompts: Prompts) -> None:
    made = prompts("")
    assert (made.real, made.dropped) == (12, 0)
    assert prompts.tokenizer.decode(made.tokens[:12]) == prompts.form("")


def test_what_does_not_fit_is_counted(prompts: Prompts) -> None:
    whole = prompts.tokenizer(prompts.form("word " * 90))["input_ids"]
    made = prompts("word " * 90)
    assert (made.real, made.dropped) == (64, len(whole) - 64)
    assert made.dropped > 30
    fitting = prompts("cat" * 4)
    assert fitting.dropped == 0 and fitting.real < 64


def test_embeddings_are_those_of_diffusers_padding_included(folder: Path) -> None:
    import torch
    from diffusers import Flux2KleinPipeline

    pipeline = Flux2KleinPipeline.from_pretrained(folder)
    with torch.no_grad():
        theirs, _ = pipeline.encode_prompt(TEXTS, max_sequence_length=TINY.text_tokens, text_encoder_out_layers=TINY.text_layers)
    encoder = TextEncoder(folder / "text_encoder", folder / "tokenizer", TINY, "float32")
    mine = np.stack([widen(made.words) for made in encoder.encode(TEXTS)])
    assert mine.shape == (len(TEXTS), 64, 192)
    np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-4, rtol=2**-8)  # half of bfloat16's last place


def test_bfloat16_is_near_float32(folder: Path) -> None:
    made = {}
    for precision in ("bfloat16", "float32"):
        encoder = TextEncoder(folder / "text_encoder", folder / "tokenizer", TINY, precision)
        made[precision] = widen(next(encoder.encode(["a red boat"])).words)
    difference = np.abs(made["bfloat16"] - made["float32"])
    assert 0 < difference.mean() < 0.03


def test_a_family_whose_text_encoder_is_not_built_is_refused_in_one_line(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"text encoder of dev \(mistral3\) is not built") as error:
        Prompts(folder / "tokenizer", family("dev"))
    assert "\n" not in str(error.value)


def test_a_tokenizer_folder_that_does_not_serve_is_refused_with_what_it_lacks(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer in .*tokenizer\.json"):
        Prompts(tmp_path, TINY)
    shutil.copytree(folder / "tokenizer", tmp_path / "silent")
    (tmp_path / "silent" / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"chat_template\.jinja is missing"):
        Prompts(tmp_path / "silent", TINY)
    shutil.copytree(folder / "tokenizer", tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text('{"version": "1.0", "mod', encoding="utf-8")
    with pytest.raises(ValueError, match="cannot be read") as error:
        Prompts(tmp_path / "broken", TINY)
    assert "\n" not in str(error.value)


def test_a_tokenizer_larger_than_the_model_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "text_encoder", tmp_path / "small")
    config = (tmp_path / "small" / "config.json").read_text().replace('"vocab_size": 1024', '"vocab_size": 300')
    (tmp_path / "small" / "config.json").write_text(config)
    with pytest.raises(ValueError, match="they do not belong together"):
        TextEncoder(tmp_path / "small", folder / "tokenizer", TINY, "float32")


def test_hidden_states_beyond_the_model_are_refused(folder: Path) -> None:
    deeper = dataclasses.replace(TINY, text_layers=(1, 2, 9))
    with pytest.raises(ValueError, match="hidden state 9 is wanted of a text encoder of 4 layers"):
        TextEncoder(folder / "text_encoder", folder / "tokenizer", deeper, "float32")
