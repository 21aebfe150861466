"""The stage negatives: documents that search ranks high and that do not answer the query."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from stages.retrieval.negatives import NegativesConfig, choose
from tests.stages.retrieval.project import make, rows, run


def test_the_hardest_come_first_and_the_own_document_never():
    scores = np.array([5.0, 4.0, 3.0, 9.0, 0.0, 0.0], np.float32)
    assert choose(scores, 5.0, [0], NegativesConfig(count=3, max_ratio=1.5)) == [1, 2, 4]
    assert choose(scores, 5.0, [0], NegativesConfig(count=9, max_ratio=1.5)) == [1, 2, 4, 5, 3]
    assert choose(scores, 5.0, [0, 1], NegativesConfig(count=2, max_ratio=2.0)) == [3, 2]
    assert choose(scores, 5.0, [0], NegativesConfig(count=2, skip=1, max_ratio=2.0)) == [1, 2]


def test_every_training_pair_has_negatives_that_are_no_duplicates_of_its_document(tmp_path):
    folder = make(tmp_path / "project", '[pairs]\nsplit = "unit"\n[negatives]\ncount = 3\n', verbs=6, things=4)
    run(folder, "sources", "units", "pairs", "negatives")
    pairs = {row["pair_id"]: row for row in rows(folder, "pairs")}
    found = defaultdict(list)
    for row in rows(folder, "negatives"):
        found[row["pair_id"]].append(row)
    trained = {key for key, row in pairs.items() if row["split"] == "train" and row["rejected"] is None}
    assert trained and found.keys() == trained
    groups = {row["unit_id"]: row["duplicate_group"] for row in pairs.values()}
    for pair_id, negatives in found.items():
        assert sorted(row["position"] for row in negatives) == [0, 1, 2]
        assert len({row["unit_id"] for row in negatives}) == 3
        assert pairs[pair_id]["duplicate_group"] not in {groups[row["unit_id"]] for row in negatives}


def test_another_document_makes_the_negatives_anew(tmp_path):
    folder = make(tmp_path / "project", '[pairs]\nsplit = "unit"\n', verbs=5, things=3)
    run(folder, "sources", "units", "pairs", "negatives")
    before = rows(folder, "negatives")
    file = folder / "code" / "new.py"
    file.write_text((folder / "code" / "flat" / "words.py").read_text().replace("values", "items"))
    run(folder, "sources", "units", "pairs", "negatives")
    assert rows(folder, "negatives") != before
    file.unlink()
    run(folder, "sources", "units", "pairs", "negatives")
    assert rows(folder, "negatives") == before


def test_no_negatives_are_wanted_with_a_count_of_zero(tmp_path):
    folder = make(tmp_path / "project", '[pairs]\nsplit = "unit"\n[negatives]\ncount = 0\n')
    run(folder, "sources", "units", "pairs", "negatives")
    assert not rows(folder, "negatives")
