"""Text embeddings against diffusers' klein pipeline, on the tiny model."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from stages.models.text.encoder import TextEncoder, widen
from stages.text_to_image.families import family

TINY = family("tiny")
TEXTS = ["", "a photo of a cat", "Füchse, 狐 🦊\nand\ttabs  two", "it's <|im_end|> 123", "word " * 90]


def test_embeddings_are_those_of_diffusers_padding_included(tiny_weights: Path) -> None:
    import torch
    from diffusers import Flux2KleinPipeline

    pipeline = Flux2KleinPipeline.from_pretrained(tiny_weights)
    with torch.no_grad():
        theirs, _ = pipeline.encode_prompt(TEXTS, max_sequence_length=TINY.text_tokens, text_encoder_out_layers=TINY.text_layers)
    encoder = TextEncoder(tiny_weights / "text_encoder", tiny_weights / "tokenizer", TINY, "float32")
    mine = np.stack([widen(made.words) for made in encoder.encode(TEXTS)])
    assert mine.shape == (len(TEXTS), 64, 192)
    np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-4, rtol=2**-8)  # half of bfloat16's last place


def test_bfloat16_is_near_float32(tiny_weights: Path) -> None:
    made = {}
    for precision in ("bfloat16", "float32"):
        encoder = TextEncoder(tiny_weights / "text_encoder", tiny_weights / "tokenizer", TINY, precision)
        made[precision] = widen(next(encoder.encode(["a red boat"])).words)
    difference = np.abs(made["bfloat16"] - made["float32"])
    assert 0 < difference.mean() < 0.03


def test_a_tokenizer_larger_than_the_model_is_refused(tiny_weights: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_weights / "text_encoder", tmp_path / "small")
    config = (tmp_path / "small" / "config.json").read_text().replace('"vocab_size": 1024', '"vocab_size": 300')
    (tmp_path / "small" / "config.json").write_text(config)
    with pytest.raises(ValueError, match="they do not belong together"):
        TextEncoder(tmp_path / "small", tiny_weights / "tokenizer", TINY, "float32")
