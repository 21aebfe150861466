"""Qwen3-VL's text part against transformers' model and diffusers' FLUX 3 pipeline, at random small sizes in float32."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from stages.models.random_model import write_tokenizer
from stages.models.text.encoder import TextEncoder, rows, text_encoder_sizes
from stages.text_to_image.families import family
from tests.checkpoints import quantised
from tests.stages.models.test_gguf import file_of

QWEN3, RECORD = family("tiny"), family("flux3-tiny")
FRAME = 8  # tokens of an empty prompt
CLOSE = 1e-5


def saved(folder: Path, seed: int) -> Any:
    """A Qwen3-VL of random sizes by transformers, in `folder` with a tokenizer beside it."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    draw = random.Random(seed)
    torch.manual_seed(seed)
    groups = draw.choice((1, 2, 3))
    text = {
        "vocab_size": 1024,
        "hidden_size": draw.choice((48, 64, 80)),
        "intermediate_size": draw.choice((96, 112)),
        "num_hidden_layers": draw.choice((5, 6)),
        "num_attention_heads": groups * draw.choice((1, 2)),
        "num_key_value_heads": groups,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.1,
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": text["hidden_size"]}
    config = Qwen3VLConfig(text_config=text, vision_config=vision | {"deepstack_visual_indexes": [0]})
    model = Qwen3VLForConditionalGeneration(config).eval()
    for name, tensor in model.named_parameters():
        if "norm" in name:
            tensor.data = 1 + 0.3 * torch.randn_like(tensor)
    model.save_pretrained(folder)
    write_tokenizer(folder, 1024)
    return model


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("qwen3_vl")
    return saved(folder, 0), folder


def encoder(folder: Path, record: Any = RECORD, **options: Any) -> TextEncoder:
    return TextEncoder(folder, folder, record, "float32", **options)


def of_diffusers(model: Any, folder: Path, text: str) -> np.ndarray:
    import torch
    from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = SimpleNamespace(tokenizer=tokenizer, apply_chat_template=tokenizer.apply_chat_template)
    with torch.no_grad():
        found: np.ndarray = Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds(
            model,
            processor,
            text,
            max_sequence_length=RECORD.text_tokens,
            hidden_states_layers=RECORD.text_layers,
        )[0].numpy()
    return found


@pytest.mark.parametrize("seed", range(2))
def test_all_rows_of_a_window_are_those_of_diffusers_and_padding_is_stored_once(seed: int, tmp_path: Path) -> None:
    model, made = saved(tmp_path, seed), encoder(tmp_path)
    for letters in (0, 3, 79 - FRAME, 80 - FRAME, 81 - FRAME, 160 - FRAME, 200):
        text = "q" * letters  # the small tokenizer has one token for each
        theirs = of_diffusers(model, tmp_path, text)
        prompt = made.prompts(text)
        real = min(letters + FRAME, 160)
        assert (prompt.real, len(prompt.ids), prompt.dropped) == (real, real + (real % 80 > 0), max(letters + FRAME - 160, 0))
        mine = np.array(made.model.encode(*rows(prompt), made.layers))[0]
        assert len(theirs) == RECORD.architecture.text_rows(real) == -(-real // 80) * 80
        mine = np.concatenate([mine, np.repeat(mine[-1:], len(theirs) - len(mine), axis=0)])
        assert np.abs(theirs).max() > 0.5
        assert np.abs(mine - theirs).max() <= CLOSE * np.abs(theirs).max(), letters
    whole, layered = (next(encoder(tmp_path, by_layer=by_layer).encode(["a cat"])) for by_layer in (False, True))
    np.testing.assert_array_equal(whole.words, layered.words)
    assert (whole.first, len(whole.words), len(whole.real)) == (0, whole.tokens + 1, whole.tokens)


def test_every_spelling_of_the_names_is_read(reference: Any, tmp_path: Path) -> None:
    expected = next(encoder(reference[1]).encode(["a cat"])).words
    for number, spelling in enumerate(("language_model.model.", "model.", "")):
        copied(reference[1], tmp_path / str(number), spelling)
        np.testing.assert_array_equal(next(encoder(tmp_path / str(number)).encode(["a cat"])).words, expected)


def test_a_text_encoder_that_mflux_saved_without_its_sizes_is_read(reference: Any, tmp_path: Path) -> None:
    copied(reference[1], tmp_path, "")
    sizes = json.loads((tmp_path / "config.json").read_text())["text_config"]
    record = replace(RECORD, text_encoder=sizes)
    stored, dense = quantised(mx.load(str(tmp_path / "model.safetensors")), 8, 64)
    (tmp_path / "config.json").unlink()
    template = tmp_path / "chat_template.jinja"
    plain = template.read_text()
    words = []
    for arrays in (stored, dense):
        mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays)
        template.write_text("{% if pictures %}<|vision_start|>{% endif %}" + plain)
        words.append(next(encoder(tmp_path, record).encode(["a cat"])).words)
    np.testing.assert_array_equal(*words)
    with pytest.raises(ValueError, match=r"holds Qwen3-VL \(chat_template\.jinja\), where this family has Qwen3"):
        encoder(tmp_path, replace(QWEN3, text_encoder=sizes | {"model_type": "qwen3"}))
    template.write_text(plain)
    with pytest.raises(ValueError, match="may be Qwen3 or the text part of Qwen3-VL, which this family has"):
        encoder(tmp_path, record)


def copied(folder: Path, to: Path, spelling: str) -> None:
    """The text part alone, by other names."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    arrays = mx.load(str(to / "model.safetensors"))
    start = "model.language_model."
    kept = {spelling + key.removeprefix(start): value for key, value in arrays.items() if key.startswith(start)}
    mx.save_safetensors(str(to / "model.safetensors"), kept)


def test_qwen3_and_the_text_part_of_qwen3_vl_are_told_apart_by_what_is_in_the_folder(
    reference: Any, tiny_weights: Path, tmp_path: Path
) -> None:
    own, qwen3 = reference[1], tiny_weights / "text_encoder"
    sizes = json.loads((own / "config.json").read_text())["text_config"]
    vl, plain = replace(RECORD, text_encoder=sizes), replace(QWEN3, text_encoder=sizes)
    with pytest.raises(ValueError, match="config has model_type = 'qwen3', which this family's Qwen3-VL does not have"):
        text_encoder_sizes(qwen3, vl)
    with pytest.raises(ValueError, match="config has model_type = 'qwen3_vl', which this family's Qwen3 does not have"):
        text_encoder_sizes(own, plain)
    names = vl, replace(plain, text_encoder=sizes | {"model_type": "qwen3"})
    for spelling, fits in (("model.language_model.", 0), ("model.", 1)):
        bare = tmp_path / f"{fits}"
        copied(own, bare, spelling)
        (bare / "config.json").unlink()
        assert text_encoder_sizes(bare / "model.safetensors", names[fits])
        said = "holds Qwen3-VL .*, where this family has Qwen3: use its own" if fits == 0 else "may be Qwen3 or the text part of"
        with pytest.raises(ValueError, match=said):
            text_encoder_sizes(bare / "model.safetensors", names[1 - fits])
    file = tmp_path / "q.gguf"
    for number, architecture in enumerate(("qwen3vl", "qwen3")):
        file.write_bytes(file_of([("token_embd.weight", (2, 32), 0, bytes(256))], architecture=architecture))
        assert text_encoder_sizes(file, names[number])
        with pytest.raises(ValueError, match=r"holds Qwen3-VL \(qwen3vl\)|may be Qwen3 or"):
            text_encoder_sizes(file, names[1 - number])
