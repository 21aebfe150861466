"""Static encoders: the vectors are those of model2vec, whose steps are repeated here, and `find --model` searches with them."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from pipeline.commands.retrieval.find import CodeFolder
from stages.models.static_embedding import load_encoder as load_model
from stages.retrieval.encoder import load_encoder
from stages.retrieval.families import family_of

WORDS = ("[UNK]", "read", "a", "file", "line", "by", "def", "count", "birds", "return", "values", "(", ")", ":")
TEXTS = ["read a file line by line", "def read(zebra): return file"]


def write_folder(folder: Path, *, cut_down: bool) -> Path:
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(0)
    arrays = {"embeddings": rng.normal(size=(7 if cut_down else len(WORDS), 16)).astype(np.float32)}
    if cut_down:
        arrays |= {"weights": rng.random(len(WORDS)).astype(np.float32), "mapping": rng.integers(0, 7, len(WORDS))}
    mx.save_safetensors(str(folder / "model.safetensors"), {name: mx.array(value) for name, value in arrays.items()})
    (folder / "config.json").write_text(json.dumps({"tokenizer_name": "words", "normalize": True}))
    kind = "sentence_transformers.models.StaticEmbedding"
    (folder / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": ".", "type": kind}]))
    return folder


@pytest.mark.parametrize("cut_down", [False, True])
def test_a_text_has_one_vector_the_mean_of_its_known_tokens_whose_rows_must_be_there(tmp_path: Path, cut_down: bool) -> None:
    folder = write_folder(tmp_path, cut_down=cut_down)
    family = family_of(folder)
    assert family.name == "model2vec"
    arrays = {name: np.array(value) for name, value in mx.load(str(folder / "model.safetensors")).items()}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text, found in zip(TEXTS, load_encoder(folder, folder, family).encode_queries(TEXTS), strict=True):
        ids = [each for each in tokenizer.encode(text, add_special_tokens=False).ids if each]
        rows = arrays["embeddings"][arrays["mapping"][ids] if cut_down else ids]
        mean = (rows * arrays["weights"][ids][:, None] if cut_down else rows).mean(axis=0)
        assert found.shape == (1, 16)
        assert np.abs(found[0] - mean / np.linalg.norm(mean)).max() < 1e-6
    if cut_down:
        stored = mx.load(str(folder / "model.safetensors")) | {"mapping": mx.array([7] * len(WORDS))}
        mx.save_safetensors(str(folder / "model.safetensors"), stored)
        with pytest.raises(ValueError, match=r"mapping in .* must name rows of the 7 of embeddings"):
            load_model(folder)


def test_find_searches_with_the_model_of_a_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (code := tmp_path / "code").mkdir()
    (code / "birds.py").write_text("def count(birds):\n    return len(birds)\n\n\ndef read(file):\n    return file\n")
    with CodeFolder(code, "semantic", model=write_folder(tmp_path / "model", cut_down=False)).current() as opened:
        answers = opened.search("count birds", 2, threshold=0)
        assert [answer.row["qualified_name"] for answer in answers] == ["count", "read"]
        assert {answer.row["count"] for answer in answers} == {1}
