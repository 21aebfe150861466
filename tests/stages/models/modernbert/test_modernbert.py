"""ColBERT on ModernBERT: hidden states as in transformers, token vectors as in PyLate, whose steps are repeated here."""

from __future__ import annotations

import functools
import json
import string
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from stages.models.modernbert.files import load_encoder as load_model
from stages.models.modernbert.files import reading
from stages.models.modernbert.model import ModernBert, ModernBertConfig
from stages.retrieval.encoder import Encoder, load_encoder
from stages.retrieval.families import family_of

LIMIT = 1e-5  # of a difference
WIDTHS = (48, 40, 32)  # of the model, and after each projection
TEXTS = ["def read_lines(path):\n    return [path] + open(path).read()", "class Parser: (parse, dates)"]


@functools.lru_cache(maxsize=1)
def reference() -> Any:
    """A random ModernBERT by transformers, whose sliding layers read 8 tokens on each side."""
    import torch
    from transformers import ModernBertConfig as TheirConfig
    from transformers import ModernBertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTHS[0], "intermediate_size": 40, "num_hidden_layers": 5, "num_attention_heads": 3}
    special = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
    model = ModernBertModel(TheirConfig(vocab_size=400, local_attention=16, initializer_range=0.2, **sizes, **special)).eval()
    for name, tensor in model.named_parameters():
        if "norm" in name:
            tensor.data = 1 + 0.3 * torch.randn_like(tensor)
    return model


def states(ids: np.ndarray, real: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        found = reference()(torch.tensor(ids), attention_mask=torch.tensor(real).long()).last_hidden_state
    made: np.ndarray = found.numpy()
    return made


def unit(vectors: np.ndarray) -> np.ndarray:
    found: np.ndarray = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return found


def test_a_random_encoder_gives_the_states_of_transformers_in_full_and_in_sliding_layers() -> None:
    model, rng = reference(), np.random.default_rng(1)
    real = np.arange(70)[None] < np.array([70, 33, 2])[:, None]
    ids = np.where(real, rng.integers(3, 400, real.shape), 0)
    config = ModernBertConfig.from_dict(model.config.to_dict(), ())
    ours = ModernBert(config, {name: mx.array(value.numpy()) for name, value in model.state_dict().items()})
    assert {block.kind for block in ours.blocks[:-1]} == {"full_attention first", "sliding_attention", "full_attention"}
    [found] = ours([mx.array(ids)], [mx.array(real)])
    assert np.abs(np.array(found) - unit(states(ids, real)))[real].max() < LIMIT


def write_folder(folder: Path, **settings: Any) -> Path:
    """As PyLate writes a model: two projections, of which the second has a residual."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[UNK]", "[CLS]", "[SEP]", "[MASK]", "[Q] ", "[D] ", *string.punctuation, *string.ascii_letters]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = [("[CLS]", 1), ("[SEP]", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    reference().save_pretrained(folder)
    rng = np.random.default_rng(2)
    for n, (inputs, outputs) in enumerate(pairwise(WIDTHS), 1):
        dense = folder / f"{n}_Dense"
        dense.mkdir()
        arrays = {"linear.weight": mx.array(rng.normal(size=(outputs, inputs)).astype(np.float32) / 7)}
        if n == 2:
            arrays["residual.weight"] = mx.array(rng.normal(size=(outputs, inputs)).astype(np.float32) / 7)
        mx.save_safetensors(str(dense / "model.safetensors"), arrays)
        about = {"in_features": inputs, "out_features": outputs, "bias": False, "use_residual": n == 2}
        (dense / "config.json").write_text(json.dumps(about | {"activation_function": "torch.nn.modules.linear.Identity"}))
    about = {"query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 40, "document_length": 60, "skiplist_words": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(about | settings))
    return folder


def expected(folder: Path, text: str, *, query: bool, expands: bool, attends: bool) -> np.ndarray:
    """What PyLate's ColBERT.tokenize and .encode do."""
    from tokenizers import Tokenizer

    tokenizer, longest = Tokenizer.from_file(str(folder / "tokenizer.json")), 40 if query else 60
    tokenizer.enable_truncation(longest - 1)
    ids = tokenizer.encode(text).ids
    ids = [ids[0], 4 if query else 5, *ids[1:]]
    count = len(ids)
    ids += [3] * (longest - count) if query and expands else []
    made = states(np.array([ids]), np.array([[attends or n < count for n in range(len(ids))]]))[0]
    for n in (1, 2):
        arrays = mx.load(str(folder / f"{n}_Dense" / "model.safetensors"))
        made = sum(made @ np.array(weight).T for weight in arrays.values())
    kept = np.array(query) | ~np.isin(ids, [0, *range(6, 6 + len(string.punctuation))][1:])
    return unit(made[kept])


@pytest.mark.parametrize(("expands", "attends"), [(False, False), (True, False), (True, True)])
def test_a_folder_of_pylate_gives_its_vectors_of_queries_and_documents(tmp_path: Path, expands: bool, attends: bool) -> None:
    folder = write_folder(tmp_path, do_query_expansion=expands, attend_to_expansion_tokens=attends)
    family = family_of(folder)
    assert family.name == "modernbert"
    read = reading(folder)
    encoder = load_encoder(folder, folder, family, query_tokens=read.query_tokens or 0)
    how = {"expands": expands, "attends": attends}
    assert encoder.tokenizer
    for text in TEXTS:
        ids = encoder.tokenizer.cut(encoder.tokenizer.encode([text])[0], read.document_tokens or 0)
        [document], [query] = encoder.encode_ids([np.array(ids, np.int32)]), encoder.encode_queries([text])
        for found, asks in ((document, False), (query, True)):
            wanted = expected(folder, text, query=asks, **how)
            assert found.shape == wanted.shape
            assert np.abs(found - wanted).max() < LIMIT


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"mlp_bias": True}, "mlp_bias of the encoder must be False, got True"),
        ("config.json", {"layer_types": ["sliding_attention"] * 5}, "layer_types of the encoder must be full_attention"),
        ("1_Dense/config.json", {"bias": True}, "the projection in .*1_Dense must have no bias and no activation"),
        ("config_sentence_transformers.json", {"query_prefix": "[X]"}, r"query_prefix must be a token .*, got '\[X\]'"),
    ],
)
def test_a_folder_that_is_computed_otherwise_is_refused_in_one_line(tmp_path: Path, file: str, change: Any, message: str) -> None:
    folder = write_folder(tmp_path)
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    with pytest.raises(ValueError, match=message):
        Encoder(load_model(folder), {}, {}, None, 32, reading(folder))  # type: ignore[arg-type]
