"""The stage vectors: token vectors of every document and of the held-out queries."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from pipeline import Project
from pipeline.commands.retrieval.export import export_retriever
from pipeline.commands.retrieval.search import Session, staleness
from stages.hashing import file_sha256
from stages.retrieval.encoder import load_encoder
from stages.retrieval.search import codes
from stages.retrieval.texts import BASE, vector_id
from stages.retrieval.vectors import _row
from stages.tuner.checkpoint import ADAPTER
from tests.stages.retrieval.project import FUNCTION, INDEXED, rows, run


def test_every_document_and_every_held_out_query_has_vectors_of_length_one(indexed):
    found = [row for row in rows(indexed, "vectors") if row["encoder"] == BASE]
    documents = {row["text_id"] for row in rows(indexed, "units")}
    used = [row for row in rows(indexed, "pairs") if row["rejected"] is None]
    held_out = {row["query_id"] for row in used if row["split"] != "train"}
    assert documents <= {row["text_id"] for row in found if row["role"] == "document"}
    assert held_out and held_out == {row["text_id"] for row in found if row["role"] == "query"}
    table = Project(indexed)["vectors"]
    for row in found:
        vectors = codes.unpack(table[row["vector_id"]])
        assert vectors.shape == (row["count"], 32) and row["vector_id"] == vector_id(BASE, row["text_id"])
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=2e-3)


@pytest.mark.proof("of many files an edited one is encoded again alone, and the index equals one built afresh")
def test_only_the_texts_of_a_changed_file_are_encoded_again_and_the_index_equals_one_built_afresh(folder, tmp_path, cases):
    there = len(list((folder / "code").rglob("*.py")))
    files = cases(there, 640)
    for number in range(there, files):
        text = FUNCTION.format(verb="sort", title="Sort", thing=f"part{number}", number=number)
        (folder / "code" / "deep" / f"part{number}.py").write_text(text)
    run(folder, *(INDEXED if files > there else ()))
    assert len(rows(folder, "sources")) == files
    file = folder / "code" / "flat" / "words.py"
    file.write_text(file.read_text().replace("values", "items").replace("# every", "# each"))
    before = {row["vector_id"] for row in rows(folder, "vectors")}
    run(folder, *INDEXED)
    after = {row["vector_id"] for row in rows(folder, "vectors")}
    changed = {row["text_id"] for row in rows(folder, "units") if row["path"] == "code/flat/words.py"}
    made = {row["text_id"] for row in rows(folder, "vectors") if row["vector_id"] in after - before and row["role"] == "document"}
    assert changed <= made and len(made) <= 2 * len(changed)  # twice: without their names, too

    fresh = tmp_path / "fresh" / "project"
    fresh.mkdir(parents=True)
    shutil.copytree(folder / "code", fresh / "code")
    shutil.copy(folder / "project.toml", fresh)
    run(fresh, *INDEXED)
    assert rows(fresh, "index") == rows(folder, "index") and rows(fresh, "ranks") == rows(folder, "ranks")
    one, other = (next((place / "tables" / "index").glob("*/artifacts/pooled-*.arrow")) for place in (folder, fresh))
    assert one.name == other.name and one.read_bytes() == other.read_bytes()


TRAINED = {"train.steps": 2, "train.batch_size": 4, "train.precision": "float32", "train.lr": 0.05, "train.rank": 2}


@pytest.fixture(scope="module")
def trained(indexed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "project"
    shutil.copytree(indexed, folder, symlinks=True)
    run(folder, "negatives", "train", overrides=TRAINED)
    return folder


def test_a_trained_adapter_adds_its_own_vectors_and_leaves_those_of_the_base(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "project", symlinks=True)
    before = {row["vector_id"] for row in rows(folder, "vectors")}
    run(folder, "vectors")
    with pytest.raises(ValueError, match="index needs the table ranks, which is not built for this configuration"):
        run(folder, "index")
    said = " ".join(run(folder, "ranks", "index"))
    assert "are too few to say whether tuning helped" in said and {row["encoder"] for row in rows(folder, "index")} == {BASE}
    run(folder, "index", overrides={"index.encoder": "tuned"})
    found = rows(folder, "vectors")
    tuned = {row["encoder"] for row in found} - {BASE}
    adapter = Project(folder, TRAINED).folder("train").folder / "artifacts" / ADAPTER
    assert tuned == {file_sha256(adapter)} and before < {row["vector_id"] for row in found}
    assert len({frozenset(row["text_id"] for row in found if row["encoder"] == name) for name in (BASE, *tuned)}) == 1
    table = Project(folder)["vectors"]
    text = next(row["text_id"] for row in found if row["role"] == "document")
    one, other = (codes.unpack(table[vector_id(name, text)]) for name in (BASE, *tuned))
    assert one.shape == other.shape and np.abs(one - other).max() > 1e-3
    assert {row["encoder"] for row in rows(folder, "index")} == tuned
    run(folder, "sources")  # the copies are other files
    said = {encoder: staleness(Project(folder, {"index.encoder": encoder})) for encoder in ("tuned", "base")}
    assert said["tuned"] == "" and said["base"].startswith("the index is of other settings: make index PROJECT=")
    assert {row["encoder"] for row in rows(folder, "ranks")} == {BASE, *tuned}
    run(folder, "vectors", overrides={"vectors.base": False})
    assert {row["encoder"] for row in rows(folder, "vectors", {"vectors.base": False})} == tuned


def test_at_half_the_strength_index_search_evaluation_and_export_use_the_base_plus_half_of_the_change(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "project", symlinks=True)
    with (folder / "project.toml").open("a") as file:
        file.write("\n[vectors]\nstrength = 0.5\n")
    run(folder, "vectors", "ranks", "index", overrides={"index.encoder": "tuned"})
    project = Project(folder)
    [tuned] = {row["encoder"] for row in rows(folder, "index")}
    assert {row["encoder"] for row in rows(folder, "ranks")} == {BASE, tuned}
    base, adapter = project.component("encoder"), Project(folder, TRAINED).folder("train").folder / "artifacts" / ADAPTER
    exported = export_retriever(Project(folder, TRAINED), tmp_path / "exported")
    text = "Sort the words of a list"
    [expected] = load_encoder(exported, exported, project.family).encode_queries([text])
    [whole] = load_encoder(base, base, project.family, adapter).encode_queries([text])
    assert np.abs(expected - whole).max() > 1e-3
    session = Session(project, "semantic")
    [found] = session.searcher.encoder.encode_queries([text])
    assert np.abs(found - expected).max() <= 2e-5
    document = next(row for row in rows(folder, "units"))
    merged = load_encoder(exported, exported, project.family)
    [stored] = merged.encode_ids([project["tokens"][document["text_id"]]])
    [strong] = load_encoder(base, base, project.family, adapter).encode_ids([project["tokens"][document["text_id"]]])
    kept = codes.unpack(project["vectors"][vector_id(tuned, document["text_id"])])
    errors = [np.square(kept - each) for each in (stored, strong)]
    assert errors[0].max() < 0.02**2 and errors[0].sum() < errors[1].sum(), "those of the whole strength are further away"
    [first, *_] = session.searcher.search(text, "semantic", 3, "")
    best = {row["unit_id"]: row for row in rows(folder, "units")}[first.row["unit_id"]]
    [vectors] = merged.encode_ids([project["tokens"][best["text_id"]]])
    assert abs(first.semantic - (expected @ vectors.T).max(axis=1).mean()) < 0.01


def test_an_index_of_another_strength_is_not_searched_and_without_an_adapter_the_base_cannot_be_left_out(indexed):
    with pytest.raises(ValueError, match="search needs the table index, which is not built for this configuration"):
        Session(Project(indexed, {"vectors.strength": 0.5}), "semantic")
    with pytest.raises(ValueError, match=r"vectors.base must be true: no adapter is trained; run make train"):
        run(indexed, "vectors", overrides={"vectors.base": False})


def test_vectors_that_are_not_finite_are_refused():
    for value in (np.nan, np.inf):
        with pytest.raises(ValueError, match="not finite for text abc"):
            _row({"text_id": "abc"}, np.full((2, 4), value, np.float32))
    assert _row({"text_id": "abc"}, np.ones((2, 4), np.float32))["count"] == 2
