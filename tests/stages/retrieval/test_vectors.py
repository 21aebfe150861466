"""The stage vectors: token vectors of every document and of the held-out queries."""

from __future__ import annotations

import shutil

import numpy as np

from pipeline import Project
from stages.retrieval.texts import BASE, vector_id
from tests.stages.retrieval.project import rows, run


def test_every_document_and_every_held_out_query_has_vectors_of_length_one(indexed):
    found = [row for row in rows(indexed, "vectors") if row["encoder"] == BASE]
    documents = {row["text_id"] for row in rows(indexed, "units")}
    used = [row for row in rows(indexed, "pairs") if row["rejected"] is None]
    held_out = {row["query_id"] for row in used if row["split"] != "train"}
    assert documents <= {row["text_id"] for row in found if row["role"] == "document"}
    assert held_out and held_out == {row["text_id"] for row in found if row["role"] == "query"}
    table = Project(indexed)["vectors"]
    for row in found:
        vectors = np.asarray(table[row["vector_id"]], np.float32)
        assert vectors.shape == (row["count"], 32) and row["vector_id"] == vector_id(BASE, row["text_id"])
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=2e-3)


def test_only_the_texts_of_a_changed_file_are_encoded_again_and_the_index_equals_one_built_afresh(indexed, tmp_path):
    folder = tmp_path / "project"
    shutil.copytree(indexed, folder, symlinks=True)
    file = folder / "code" / "flat" / "words.py"
    file.write_text(file.read_text().replace("values", "items").replace("# every", "# each"))
    before = {row["vector_id"] for row in rows(folder, "vectors")}
    run(folder, "sources", "units", "pairs", "tokens", "vectors", "index", "ranks")
    after = {row["vector_id"] for row in rows(folder, "vectors")}
    changed = {row["text_id"] for row in rows(folder, "units") if row["path"] == "code/flat/words.py"}
    made = {row["text_id"] for row in rows(folder, "vectors") if row["vector_id"] in after - before and row["role"] == "document"}
    assert changed <= made and len(made) <= 2 * len(changed)  # twice: without their names, too

    fresh = tmp_path / "fresh" / "project"
    fresh.mkdir(parents=True)
    shutil.copytree(folder / "code", fresh / "code")
    shutil.copy(folder / "project.toml", fresh)
    run(fresh, "sources", "units", "pairs", "tokens", "vectors", "index", "ranks")
    assert rows(fresh, "index") == rows(folder, "index") and rows(fresh, "ranks") == rows(folder, "ranks")
    one, other = (next((place / "tables" / "index").glob("*/artifacts/vectors-*.npy")) for place in (folder, fresh))
    assert one.name == other.name and one.read_bytes() == other.read_bytes()
