"""`latentmill export` of a retriever: the folder is what transformers and sentence-transformers load, and scores the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pipeline.commands.retrieval.export import export_retriever
from pipeline.project.project import Project
from stages.models.t5.files import load_weights, read_sizes
from stages.retrieval.encoder import load_encoder
from tests import projects
from tests.stages.retrieval import project
from tests.stages.retrieval.train.test_train import SETTINGS, UPSTREAM

OVERRIDES = {"train.steps": 4, "train.checkpoint_every": 2, "train.validation.every": 4}
QUERIES = ["Count the words of a list.", "Sort lines and keep the largest", "merge invoices"]
DOCUMENTS = ["def count_words(values): return len(values)", "for value in values: found.append(value)", "sort lines"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = project.make(tmp_path_factory.mktemp("trained") / "shelf", SETTINGS, verbs=10, things=4)
    project.run(folder, *UPSTREAM, "train", overrides=OVERRIDES)
    return Project(folder, OVERRIDES)


@pytest.fixture(scope="module")
def exported(trained: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_retriever(trained, tmp_path_factory.mktemp("exported") / "model")


def encoder(trained: Project, adapter: bool) -> Any:
    folder = trained.component("encoder")
    file = trained.folder("train").folder / "artifacts" / "adapter.safetensors"
    return load_encoder(folder, folder, trained.family, file if adapter else None)


def scores(encoder: Any) -> np.ndarray:
    queries, documents = (encoder.encode_queries(texts) for texts in (QUERIES, DOCUMENTS))
    return np.array([[(q @ d.T).max(axis=1).sum() for d in documents] for q in queries])


def test_transformers_loads_every_tensor_of_the_exported_encoder(exported: Path) -> None:
    from transformers import T5EncoderModel

    model, info = T5EncoderModel.from_pretrained(exported, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours = load_weights(exported, read_sizes(exported))
    for name, value in model.state_dict().items():
        if name != "encoder.embed_tokens.weight":
            assert np.array_equal(value.numpy(), np.array(ours[name])), name


def test_the_exported_folder_scores_as_the_adapter_does(trained: Project, exported: Path) -> None:
    merged = load_encoder(exported, exported, trained.family)
    assert np.abs(scores(merged) - scores(encoder(trained, True))).max() <= 2e-5
    assert np.abs(scores(merged) - scores(encoder(trained, False))).max() > 1e-3


def test_sentence_transformers_scores_the_exported_folder_the_same(trained: Project, exported: Path) -> None:
    pytest.importorskip("sentence_transformers", minversion="6.2")
    from sentence_transformers import MultiVectorEncoder

    model = MultiVectorEncoder(str(exported), device="cpu")
    queries = model.encode_query(QUERIES)
    documents = model.encode_document(DOCUMENTS)
    theirs = np.array(model.similarity(queries, documents))
    assert np.abs(theirs - scores(encoder(trained, True))).max() <= 1e-5
    tokenizer = encoder(trained, True)
    for text, found in zip(QUERIES, queries, strict=True):
        assert len(found) == len(tokenizer.query_ids(text)), "both score the same tokens"


def test_weights_are_rounded_once_to_the_type_that_is_asked_for(trained: Project, exported: Path, tmp_path: Path) -> None:
    folder = export_retriever(trained, tmp_path / "half", dtype="bfloat16")
    stored: Any = mx.load(str(folder / "model.safetensors"))
    exact: Any = mx.load(str(exported / "model.safetensors"))
    assert all(mx.array_equal(stored[name], exact[name].astype(mx.bfloat16)).item() for name in exact)


def test_the_command_writes_a_checkpoint_and_refuses_what_is_missing(trained: Project, tmp_path: Path) -> None:
    sets = [part for name, value in OVERRIDES.items() for part in ("--set", f"{name}={value}")]
    projects.latentmill(trained.path, "export", "--step", "2", *sets)
    (folder,) = (trained.path / "exports").glob("shelf-*-000002-merged")
    assert (folder / "1_Dense" / "model.safetensors").is_file() and trained.folder("train").folder.name in folder.name
    assert "exists; move it away" in projects.latentmill(trained.path, "export", "--step", "2", *sets, code=2)
    assert "its checkpoints are 2, 4" in projects.latentmill(trained.path, "export", "--step", "3", *sets, code=2)
    missing = projects.latentmill(trained.path, "export", "--which", "average", *sets, code=2)
    assert "it was trained without [train.ema]" in missing


def test_an_adapter_that_lacks_an_array_is_an_error_and_nothing_is_written(trained: Project, tmp_path: Path) -> None:
    file = trained.folder("train").folder / "artifacts" / "adapter.safetensors"
    content = file.read_bytes()
    loaded: Any = mx.load(str(file), return_metadata=True)
    arrays, metadata = loaded
    arrays.pop("encoder.block.1.layer.0.SelfAttention.v.lora_B.weight")
    unrecorded = metadata | {"step": "3"}  # no checkpoint has this step, so no checksum of the file is known
    lacks = r"the adapter lacks encoder.block.1.layer.0.SelfAttention.v.lora_B.weight"
    try:
        for header, said in ((metadata, r"is damaged: it has \d+ bytes instead of \d+"), (unrecorded, lacks)):
            mx.save_safetensors(str(file), arrays, header)
            with pytest.raises(ValueError, match=said):
                export_retriever(trained, tmp_path / "out")
    finally:
        file.write_bytes(content)
    assert not (tmp_path / "out").exists()
