"""The recipes of other trainers: every recipe is valid, equal in samples, and the page has no number that is not in the rows."""

import numpy as np
import pytest

from data import DATA, DOCS, MEASUREMENTS
from data.research.experiments import recipes, recipes_page
from data.research.experiments.in_memory import MemoryTables
from pipeline.project.project import Project
from pipeline.project.stage_run import ArrayReader
from tests import harness, projects

ROWS = recipes.read_rows(MEASUREMENTS / "recipes.jsonl")


def test_all_recipes_are_valid_and_train_on_the_same_number_of_samples():
    for name, settings in recipes.recipes(300).items():
        config = Project(recipes.EXAMPLE, settings).config.sections["train"]
        assert config.steps * config.batch_size * config.accumulate == 1200, name
        if config.schedule.shape == "cosine":
            assert config.schedule.warmup_steps + config.schedule.decay_steps == config.steps, name


def test_the_rows_of_a_recipe_were_made_with_its_settings_and_three_seeds():
    chosen = recipes.recipes(300)
    assert set(ROWS) == set(chosen)
    for name, rows in ROWS.items():
        assert sorted(row["seed"] for row in rows) == [0, 1, 2]
        assert all(row["set"] == chosen[name] for row in rows)


def test_the_page_of_the_recipes_is_made_from_the_rows():
    text = (DOCS / "experiments" / recipes_page.PAGE).read_text()
    assert recipes_page.with_table(text, "recipes", recipes_page.table(ROWS)) == text


def test_an_interval_over_seeds_and_prompts_holds_its_mean_and_is_narrow_for_equal_scores():
    rows = [{"scores": {"style": [[0.0, 1.0]] * 8}} for _ in range(3)]
    assert recipes.interval(rows, "style") == recipes.Interval(1.0, 1.0, 1.0)
    draw = np.random.default_rng(1)
    rows = [{"scores": {"agreement": draw.normal(size=(20, 2)).tolist()}} for _ in range(3)]
    found = recipes.interval(rows, "agreement")
    assert found.low < found.mean < found.high


def test_stages_in_memory_compute_the_rows_that_the_runner_stores(tmp_path, tiny_weights):
    folder = projects.make(tmp_path / "project", tiny_weights, images=3)
    tables = MemoryTables(tmp_path / "memory")
    for name in ("images", "captions", "buckets", "latents", "embeddings", "train"):
        projects.build(folder, name)
        project = Project(folder)
        schema = project.stage(name).writes
        stored, found = project.current(name).rows(), tables.run(project, name)
        compared = [column for column in harness.compared(schema) if column in stored.column_names]
        keys = [(key, "ascending") for key in schema.key]
        assert found.select(compared).sort_by(keys).equals(stored.select(compared).sort_by(keys)), name
        if schema.tensors:
            key = found[schema.key[0]][0].as_py()
            with_runner = project.open("train").inputs.tensors(schema).read(key)
            assert np.array_equal(with_runner, ArrayReader(found, schema).read(key))


@pytest.mark.parametrize("column", recipes.COLUMNS)
def test_the_example_over_three_seeds_keeps_what_the_page_says(column):
    found = recipes.interval(recipes.read_rows(MEASUREMENTS / "example.jsonl")["data/projects/example"], column)
    assert str(found) in (DATA / "docs" / "pictures.md").read_text()
