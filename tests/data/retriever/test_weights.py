"""The bundled weights of retriever-micro: they load as their family, agree with transformers, and rank real functions."""

from __future__ import annotations

import importlib
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from data import ASSETS
from data.research.retriever.extract import functions
from pipeline.project.weights import resolve
from stages.models.t5.model import rms_norm
from stages.retrieval.encoder import Encoder, load_encoder
from stages.retrieval.families import FAMILIES

FOLDER = ASSETS / "retriever"
FAMILY = FAMILIES["retriever-micro"]
ASKED = {
    "textwrap dedent": "Remove any common leading whitespace from every line in text.",
    "bisect bisect_left": "Return the index where to insert item x in list a, assuming a is sorted.",
    "glob escape": "Escape all special characters.",
    "heapq merge": "Merge multiple sorted inputs into a single sorted output.",
}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Encoder:
    folder = resolve("", tmp_path_factory.mktemp("project"), FAMILY)
    assert folder == FOLDER
    return load_encoder(folder, folder, FAMILY)


@pytest.fixture(scope="module")
def documents() -> list[tuple[str, str]]:
    """(module and name, text) of every function in the modules that are asked for."""
    found = []
    for module in sorted({place.split()[0] for place in ASKED}):
        source = Path(str(importlib.import_module(module).__file__)).read_text(encoding="utf-8")
        found += [(f"{module} {each.name}", each.text) for each in functions(source, module)]
    return found


def test_tokens_hidden_states_and_vectors_of_the_bundled_weights_are_those_of_transformers(encoder, documents):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoTokenizer, T5Config, T5EncoderModel

    from data.research.retriever import export

    tokenizer = AutoTokenizer.from_pretrained(str(FOLDER), local_files_only=True)
    for query in ASKED.values():
        assert encoder.query_ids(query).tolist() == tokenizer(query)["input_ids"]
    texts = [*ASKED.values(), *(text for _, text in documents[:5])]
    many = [tokenizer(text)["input_ids"][:256] for text in texts]
    real = np.arange(max(map(len, many)))[None] < np.array([[len(ids)] for ids in many])
    ids = np.zeros(real.shape, np.int32)
    ids[real] = np.concatenate(many)
    model = T5EncoderModel(T5Config.from_pretrained(FOLDER, local_files_only=True)).eval()
    found = model.load_state_dict(export.widen(load_file(FOLDER / "model.safetensors")), strict=False)
    assert not found.unexpected_keys and set(found.missing_keys) <= {"encoder.embed_tokens.weight"}
    head = load_file(FOLDER / "1_Dense" / "model.safetensors")["linear.weight"].float()
    with torch.no_grad():
        theirs = model(torch.tensor(ids), attention_mask=torch.tensor(real).long()).last_hidden_state
        unit = torch.nn.functional.normalize(theirs @ head.T, dim=-1).numpy()
    t5 = encoder.model
    h_TD, shared = t5.enter([mx.array(ids)], [mx.array(real)])
    for block in t5.blocks[:-1]:
        h_TD = t5.block(block.kind)(block.weights, h_TD, shared)
    norm = t5.blocks[-1].weights["final_layer_norm.weight"]
    ours = np.array(rms_norm(h_TD, norm, t5.config.layer_norm_epsilon)).reshape(*ids.shape, -1)
    assert np.abs(ours - theirs.numpy())[real].max() < 5e-5
    for row, vectors in enumerate(encoder.encode_ids([np.array(each, np.int32) for each in many])):
        assert np.abs(vectors - unit[row, : len(vectors)]).max() < 5e-5


def test_the_bundled_retriever_finds_functions_of_the_standard_library_by_what_they_do(encoder, documents):
    names = [name for name, _ in documents]
    assert encoder.tokenizer
    ids = encoder.tokenizer.encode([text for _, text in documents])
    rows = [np.array(encoder.tokenizer.cut(each, 128), np.int32) for each in ids]
    vectors = encoder.encode_ids(rows)
    ranks = []
    for place, query in zip(ASKED, encoder.encode_queries(list(ASKED.values())), strict=True):
        scores = np.array([(query @ each.T).max(1).mean() for each in vectors])
        ranks.append(int((scores >= scores[names.index(place)]).sum()))
    assert len(names) > 40
    # Each version of Python has other functions to choose from.
    assert np.mean([1 / rank for rank in ranks]) > 0.6, ranks
