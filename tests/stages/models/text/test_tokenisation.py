"""Tokenized prompts against diffusers' klein pipeline, on the tiny model."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stages.models.text import tokenisation
from stages.models.text.tokenisation import PromptTokenizer
from stages.text_to_image.families import family

TINY = family("tiny")
TEXTS = ["", "a photo of a cat", "Füchse, 狐 🦊\nand\ttabs  two", "it's <|im_end|> 123", "word " * 90]


@pytest.fixture
def prompts(tiny_weights: Path) -> PromptTokenizer:
    return PromptTokenizer(tiny_weights / "tokenizer", TINY)


def ids_of_diffusers(tiny_weights: Path, text: str) -> tuple[list[int], list[int]]:
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

    tokenizer = AutoTokenizer.from_pretrained(tiny_weights / "tokenizer")
    embed = Flux2KleinPipeline._get_qwen3_prompt_embeds
    embed(Recorder(), tokenizer, text, max_sequence_length=TINY.text_tokens, hidden_states_layers=TINY.text_layers)
    return given["input_ids"][0].tolist(), given["attention_mask"][0].tolist()


def test_a_prompt_is_one_user_turn_with_thinking_closed(prompts: PromptTokenizer) -> None:
    formed = "<|im_start|>user\nPROMPT<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert prompts.apply_template("PROMPT") == formed


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_and_padding_are_those_of_diffusers(tiny_weights: Path, prompts: PromptTokenizer, text: str) -> None:
    ids, real = ids_of_diffusers(tiny_weights, text)
    prompt = prompts(text)
    assert prompt.ids.tolist() == ids
    assert prompt.real == sum(real) and real == sorted(real, reverse=True)


def test_an_empty_prompt_is_an_empty_turn(prompts: PromptTokenizer) -> None:
    prompt = prompts("")
    assert (prompt.real, prompt.dropped) == (12, 0)
    assert prompts.tokenizer.decode(prompt.ids[:12]) == prompts.apply_template("")


def test_tokens_that_are_cut_off_are_counted(prompts: PromptTokenizer) -> None:
    whole = prompts.tokenizer(prompts.apply_template("word " * 90))["input_ids"]
    prompt = prompts("word " * 90)
    assert (prompt.real, prompt.dropped) == (64, len(whole) - 64)
    assert prompt.dropped > 30
    fitting = prompts("cat" * 4)
    assert fitting.dropped == 0 and fitting.real < 64


def test_an_incomplete_tokenizer_folder_is_refused_with_what_it_lacks(tiny_weights: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer in .*tokenizer\.json"):
        PromptTokenizer(tmp_path, TINY)
    shutil.copytree(tiny_weights / "tokenizer", tmp_path / "silent")
    (tmp_path / "silent" / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"chat_template\.jinja is missing"):
        PromptTokenizer(tmp_path / "silent", TINY)
    shutil.copytree(tiny_weights / "tokenizer", tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text('{"version": "1.0", "mod', encoding="utf-8")
    with pytest.raises(ValueError, match="cannot be read") as error:
        PromptTokenizer(tmp_path / "broken", TINY)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "did not end within 0.2 s"),
        ("{{ 'x' * 10000000000 }}", "must not use Mul"),
        ("{{ '%9999999999d' % 1 }}", "must not use Mod"),
        ("{% set loop = namespace(index='%9999999999d') %}{{ loop.index % 1 }}", "must not use Mod"),
        ("{{ 'x' | center(9999999999) }}", "must not use center"),
        ("{{ 'x'.ljust(9999999999) }}", "must not use ljust"),
        ("{{ messages[7].content.nothing.at.all }}", "the chat template failed"),
        ("{% if %}", "cannot be read"),
        ("x" * 200_000, "at most 100,000 characters"),
    ],
)
def test_a_hostile_chat_template_is_one_line(
    tiny_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, said: str
) -> None:
    monkeypatch.setattr(tokenisation, "TEMPLATE_SECONDS", 0.2)
    shutil.copytree(tiny_weights / "tokenizer", tmp_path / "hostile")
    (tmp_path / "hostile" / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=said) as error:
        PromptTokenizer(tmp_path / "hostile", TINY)("a cat")
    assert "\n" not in str(error.value)


def test_no_code_in_the_folder_of_a_tokenizer_runs(tiny_weights: Path, tmp_path: Path) -> None:
    folder, ran = shutil.copytree(tiny_weights / "tokenizer", tmp_path / "coded"), tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast as Own\n")
    about = json.loads((folder / "tokenizer_config.json").read_text())
    about |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "config.json").write_text(
        json.dumps({"auto_map": {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", "own.Own"]}})
    )
    with contextlib.suppress(ValueError):  # refused, or read without that code
        PromptTokenizer(folder, TINY)
    assert not ran.exists()


def test_a_named_pipe_in_the_tokenizers_folder_is_not_waited_for(tiny_weights: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_weights / "tokenizer", tmp_path / "piped")
    os.mkfifo(tmp_path / "piped" / "special_tokens_map.json")
    with pytest.raises(ValueError, match=r"special_tokens_map\.json is not a regular file"):
        PromptTokenizer(tmp_path / "piped", TINY)
