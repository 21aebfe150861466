"""The experiment that tunes to a library: it ranks as the evaluation does, and reads the test queries for one recipe only."""

import json

import numpy as np
import pytest

from data.library import experiment
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
    recipes = {"three steps": SETTINGS, "no step": SETTINGS | {"train.lr": 0.0}}
    experiment.run(folder / "tables", project, folder / "out.jsonl", 2, 60.0, recipes)
    return folder, project, recipes


def test_scores_are_those_of_the_search():
    draws = np.random.default_rng(0)
    queries, documents = ([draws.normal(size=(n, 8)).astype(np.float32) for n in counts] for counts in ((3, 1), (4, 9, 1)))
    expected = TokenMatrix(np.concatenate(documents), [len(each) for each in documents]).scores(queries)
    assert np.abs(experiment.maxsim(queries, documents) - expected).max() < 1e-5


def test_an_adapter_of_learning_rate_zero_ranks_as_the_base(results):
    folder, _, _ = results
    rows = {row["recipe"]: row for row in experiment.read(folder / "out.jsonl") if row["seed"] == 0}
    assert [rows["no step"][split] for split in ("valid", "test")] == [rows["base"][split] for split in ("valid", "test")]
    assert rows["three steps"]["test"] != rows["base"]["test"]
    assert len(rows["base"]["test"]) > 3


def test_further_seeds_are_of_the_recipe_that_is_best_on_the_validation_queries(results):
    folder, _, _ = results
    rows = experiment.read(folder / "out.jsonl")
    assert [row["recipe"] for row in rows] == ["base", "three steps", "no step", experiment.best_recipe(rows)]
    made = [{"recipe": name, "seed": 0, "valid": [v], "test": [t]} for name, v, t in (("base", 1, 1), ("a", 2, 1), ("b", 1, 9))]
    assert experiment.best_recipe(made) == "b"


def test_a_run_that_is_there_is_not_made_again(results):
    folder, project, recipes = results
    before = (folder / "out.jsonl").read_text()
    experiment.run(folder / "tables", project, folder / "out.jsonl", 2, 60.0, recipes)
    assert (folder / "out.jsonl").read_text() == before


def test_the_report_gives_the_difference_of_the_chosen_recipe_with_its_interval(tmp_path):
    rows = [
        {"recipe": "base", "seed": 0, "valid": [2, 2], "test": [2] * 40},
        {"recipe": "a", "seed": 0, "valid": [1, 2], "test": [1] * 30 + [2] * 10},
        {"recipe": "b", "seed": 0, "valid": [3, 2], "test": [1] * 40},
    ]
    (tmp_path / "out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = experiment.report(tmp_path / "out.jsonl")
    assert "Test, 40 queries, recipe: a" in text
    assert "Seed 0 less base, MRR@10: +0.375 [+0.3" in text
