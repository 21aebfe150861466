"""The stage ranks and the command evaluate."""

from __future__ import annotations

from pipeline import Project
from pipeline.commands.retrieval.evaluate import evaluate
from stages.retrieval.search import codes
from tests.stages.retrieval.project import rows, run


def test_every_held_out_pair_is_ranked_in_both_modes(indexed):
    used = [row for row in rows(indexed, "pairs") if row["rejected"] is None and row["split"] != "train"]
    found = rows(indexed, "ranks")
    assert {(row["pair_id"], row["mode"]) for row in found} == {
        (row["pair_id"], mode) for row in used for mode in ("plain", "hard")
    }
    for row in found:
        assert min(row["lexical"], row["semantic"], row["hybrid"]) >= 1
        assert max(row["lexical"], row["semantic"], row["hybrid"]) <= row["candidates"]
    assert len({row["weight"] for row in found if row["mode"] == "plain"}) == 1


def test_semantic_ranks_equal_brute_force(indexed):
    table, units = Project(indexed)["vectors"], rows(indexed, "units")
    vector = {row["text_id"]: codes.unpack(table[row["vector_id"]]) for row in rows(indexed, "vectors")}
    pairs = {row["pair_id"]: row for row in rows(indexed, "pairs")}
    for row in [row for row in rows(indexed, "ranks") if row["mode"] == "plain"][:10]:
        query = vector[pairs[row["pair_id"]]["query_id"]]
        scores = {unit["unit_id"]: float((query @ vector[unit["text_id"]].T).max(axis=1).mean()) for unit in units}
        own = scores[row["unit_id"]]
        assert row["semantic"] in (
            sum(s > own + 1e-5 for s in scores.values()) + 1,
            sum(s >= own - 1e-5 for s in scores.values()),
        )


def test_ranks_of_pairs_are_among_units_with_pairs_and_without_held_out_pairs_the_evaluation_says_why_there_are_none(folder):
    overrides = {"ranks.candidates": "pairs"}
    run(folder, "ranks", overrides=overrides)
    used = [row for row in rows(folder, "pairs") if row["rejected"] is None]
    assert {row["candidates"] for row in rows(folder, "ranks", overrides)} <= {len(used), len(used) - 1}
    none = {"pairs.test": 0.0, "pairs.valid": 0.0}
    run(folder, "pairs", "tokens", "vectors", "ranks", overrides=none)
    assert rows(folder, "ranks", none) == []
    assert "pairs.test" in " ".join(evaluate(Project(folder, none)))
