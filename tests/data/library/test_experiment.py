"""The experiment that tunes to a library: it ranks as the evaluation does, and reads the test queries for one recipe only."""

import json

import numpy as np
import pytest

from data.research.library import by_mlx, by_torch, experiment
from stages.retrieval.search.maxsim import TokenMatrix
from tests.stages.retrieval import project as small

SETTINGS = {
    "train.steps": 3,
    "train.hard_negatives": 1,
    "train.batch_size": 2,
    "train.rank": 2,
    "train.lr": 0.02,
    "train.precision": "float32",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    project = small.make(folder / "project", verbs=6, things=5)
    experiment.prepare(project, folder / "tables")
    recipes = {"three steps": SETTINGS, "no step": SETTINGS | {"train.lr": 1e-12}}
    experiment.run(folder / "tables", project, folder / "out.jsonl", 2, 60.0, recipes)
    return folder, project


@pytest.fixture(scope="module")
def trained(results, tmp_path_factory):
    """(the tables, the project at the settings of the run, its adapter)."""
    folder, project = results
    tables = experiment.load(folder / "tables", tmp_path_factory.mktemp("trained"))
    chosen = experiment.Project(project, experiment.at_length(project, SETTINGS))
    return tables, chosen, experiment.train(tables, chosen)[0]


def test_scores_are_those_of_the_search():
    draws = np.random.default_rng(0)
    queries, documents = ([draws.normal(size=(n, 8)).astype(np.float32) for n in counts] for counts in ((3, 1), (4, 9, 1)))
    expected = TokenMatrix(np.concatenate(documents), [len(each) for each in documents]).scores(queries)
    for by in (by_mlx, by_torch):
        assert np.abs(by.maxsim(queries, documents) - expected).max() < 1e-5


def test_a_run_without_change_ranks_as_the_base_at_every_strength_and_so_does_strength_zero(results, trained):
    rows = experiment.read(results[0] / "out.jsonl")
    [base] = [row for row in rows if row["recipe"] == "base"]
    unchanged = [row["valid"] for row in rows if row["recipe"] == "no step" and "test" not in row]
    assert unchanged == [base["valid"]] * len(experiment.STRENGTHS)
    of = {share: experiment.ranks(*trained, share, ("test",))["test"] for share in (0.0, 1.0)}
    assert of[0.0] == base["test"] != of[1.0]
    assert len(base["test"]) > 3


def test_pytorch_encodes_as_mlx_does_at_every_strength(trained):
    _, chosen, adapter = trained
    draws = np.random.default_rng(0)
    texts = [draws.integers(3, 90, size=n).astype(np.int32) for n in (5, 40, 1)]
    found = {}
    for share in (0.0, 0.5, 1.0):
        asked = chosen.family, chosen.component("encoder"), adapter, share, texts
        found[share] = by_mlx.encode(*asked)
        for ours, theirs in zip(found[share], by_torch.encode(*asked), strict=True):
            assert ours.shape == theirs.shape
            assert np.abs(ours - theirs).max() < 2e-5
    assert np.abs(found[0.5][1] - found[1.0][1]).max() > 1e-3


def test_the_test_queries_are_read_for_the_base_and_the_recipe_that_is_best_on_the_validation_queries(results):
    rows = experiment.read(results[0] / "out.jsonl")
    best, strength = experiment.best_recipe(rows)
    tested = [(row["recipe"], row["strength"], row["seed"]) for row in rows if "test" in row]
    assert sorted(tested) == sorted([("base", 0.0, 0), (best, strength, 0), (best, strength, 1)])
    made = [("a", 1, 2, None), ("b", 0.5, 1, None), ("b", 1, 3, None), ("c", 1, 1, 1)]
    assert experiment.best_recipe(
        [{"recipe": n, "strength": s, "valid": [v]} | ({"test": [t]} if t else {}) for n, s, v, t in made]
    ) == ("b", 0.5)


def test_the_report_gives_the_difference_of_the_chosen_recipe_with_its_interval(tmp_path):
    strengths = [{"strength": share} for share in experiment.STRENGTHS]
    rows = [
        {"recipe": "base", "seed": 0, "strength": 0.0, "valid": [2, 2], "test": [2] * 40},
        *({"recipe": "a", "seed": 0, "valid": [1, 2]} | share for share in strengths),
        *({"recipe": "b", "seed": 0, "valid": [3, 2]} | share for share in strengths),
        {"recipe": "a", "seed": 0, "strength": 0.25, "valid": [1, 2], "test": [1] * 30 + [2] * 10},
        {"recipe": "a", "seed": 1, "strength": 0.25, "valid": [1, 2], "test": [1] * 10 + [2] * 30},
    ]
    (tmp_path / "out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = experiment.report(tmp_path / "out.jsonl")
    assert "Test, 40 queries, recipe: a, strength 0.25" in text
    assert "Seed 0 less base, MRR@10: +0.375 [+0.3" in text
    assert "Mean of 2 seeds less base, MRR@10: +0.250 [+0.1" in text
