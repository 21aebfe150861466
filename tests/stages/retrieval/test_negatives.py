"""The stage negatives: documents that search ranks high and that do not answer the query."""

from __future__ import annotations

import shutil
from collections import defaultdict

import numpy as np
import pytest

from pipeline import Project
from stages.retrieval.encoder import load_encoder
from stages.retrieval.negatives import NegativesConfig, choose
from tests.stages.retrieval.project import make, rows, run


def test_the_hardest_come_first_and_the_own_document_never():
    scores = np.array([5.0, 4.0, 3.0, 9.0, 0.0, 0.0], np.float32)
    assert choose(scores, 5.0, [0], NegativesConfig(count=3, max_ratio=1.5)) == [1, 2, 4]
    assert choose(scores, 5.0, [0], NegativesConfig(count=9, max_ratio=1.5)) == [1, 2, 4, 5, 3]
    assert choose(scores, 5.0, [0, 1], NegativesConfig(count=2, max_ratio=2.0)) == [3, 2]
    assert choose(scores, 5.0, [0], NegativesConfig(count=2, skip=1, max_ratio=2.0)) == [1, 2]


def test_every_training_pair_has_negatives_that_are_neither_duplicates_of_its_document_nor_of_held_out_pairs(tmp_path):
    shares = "valid = 0.3\ntest = 0.3\nmax_leak = 1.0\n"
    folder = make(tmp_path / "project", f'[pairs]\nsplit = "unit"\n{shares}[negatives]\ncount = 3\n', verbs=6, things=4)
    run(folder, "sources", "units", "pairs", "tokens", "negatives")
    pairs = {row["pair_id"]: row for row in rows(folder, "pairs")}
    found = defaultdict(list)
    for row in rows(folder, "negatives"):
        found[row["pair_id"]].append(row)
    trained = {key for key, row in pairs.items() if row["split"] == "train" and row["rejected"] is None}
    assert trained and found.keys() == trained
    groups = {row["unit_id"]: row["duplicate_group"] for row in pairs.values()}
    splits = {row["unit_id"]: row["split"] for row in pairs.values()}
    assert set(splits.values()) == {"train", "valid", "test"}
    for pair_id, negatives in found.items():
        assert sorted(row["position"] for row in negatives) == [0, 1, 2]
        assert len({row["unit_id"] for row in negatives}) == 3
        assert {splits.get(row["unit_id"], "train") for row in negatives} == {"train"}
        assert pairs[pair_id]["duplicate_group"] not in {groups[row["unit_id"]] for row in negatives}


def test_another_document_makes_the_negatives_anew_and_with_a_count_of_zero_none_are_wanted(folder):
    run(folder, "negatives")
    before = rows(folder, "negatives")
    file = folder / "code" / "new.py"
    text = (folder / "code" / "flat" / "words.py").read_text()
    for change in (lambda: file.write_text(text.replace("values", "items")), file.unlink):
        change()
        run(folder, "sources", "units", "pairs", "tokens", "negatives")
        assert (rows(folder, "negatives") == before) is not file.exists()
    run(folder, "negatives", overrides={"negatives.count": 0})
    assert not rows(folder, "negatives", {"negatives.count": 0})


def test_negatives_of_an_encoder_are_the_documents_that_its_vectors_rank_high(folder):
    run(folder, "negatives", "train", overrides={"train.lr": 0.05})
    adapter = next(folder.glob("tables/train/*/artifacts/adapter.safetensors"))
    shutil.copy(adapter, folder / "earlier.safetensors")
    found = {}
    for name in ("base", "earlier.safetensors"):
        overrides = {"negatives.encoder": name, "negatives.count": 2}
        run(folder, "negatives", overrides=overrides)
        found[name] = sorted(rows(folder, "negatives", overrides), key=lambda row: (row["pair_id"], row["position"]))
        assert {row["source"] for row in found[name]} == {name}
    assert [row["score"] for row in found["base"]] != [row["score"] for row in found["earlier.safetensors"]]

    project = Project(folder)
    tokens = project["tokens"]
    encoder = load_encoder(project.component("encoder"), None, project.family)
    queries = {row["pair_id"]: row["query_id"] for row in rows(folder, "pairs")}
    for row in found["base"][:6]:
        texts = (queries[row["pair_id"]], row["text_id"])
        (query,), (document,) = (encoder.encode_ids([np.asarray(tokens[text_id], np.int32)]) for text_id in texts)
        products = query @ document.astype(np.float16).astype(np.float32).T
        assert row["score"] == pytest.approx(products.max(axis=1).mean(), abs=1e-4)
    with pytest.raises(ValueError, match=r'negatives.encoder must be "", "base" or an adapter file, got none: there is no file'):
        run(folder, "negatives", overrides={"negatives.encoder": "none"})
