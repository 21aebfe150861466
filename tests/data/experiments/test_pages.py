"""Every page of an experiment shows the committed rows, and the settings of its runs are valid."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from data import DOCS, EXAMPLE, MEASUREMENTS
from data.research.experiments import (
    few_pictures,
    recipes,
    recipes_page,
    regularisation,
    report,
    results,
    slider,
    stopping,
    tokens,
)
from pipeline.project.project import Project

HERE = DOCS / "experiments"
ROWS = recipes.read_rows(MEASUREMENTS / "recipes.jsonl")
STOPPING = stopping.read_rows(MEASUREMENTS / "stopping.jsonl")
PAGES: dict[str, tuple[Path, Callable[[str], str]]] = {  # what the page must be, of its text
    "experiments": (HERE / report.PAGE, lambda text: report.with_tables(text, results.read())),
    "recipes": (HERE / recipes_page.PAGE, lambda text: report.with_table(text, "recipes", recipes_page.table(ROWS))),
    "stopping": (DOCS / "checkpoints.md", lambda text: report.with_table(text, "stopping", stopping.table(STOPPING))),
}
TABLES: dict[str, tuple[Path, Callable[[], str]]] = {
    "few pictures": (few_pictures.PAGE, lambda: few_pictures.table(few_pictures.read_rows(few_pictures.FILE))),
    "regularisation": (
        HERE / "regularisation.md",
        lambda: regularisation.table(regularisation.read_rows(MEASUREMENTS / "regularisation.jsonl")),
    ),
    "slider": (slider.PAGE, lambda: slider.table(slider.read_rows(slider.FILE))),
    "tokens": (tokens.PAGE, lambda: tokens.table(tokens.read_rows(tokens.FILE))),
    "steps of tokens": (tokens.PAGE, lambda: tokens.steps_table(tokens.read_rows(tokens.FILE, "step"))),
}


@pytest.mark.parametrize("name", [*PAGES, *TABLES])
def test_a_page_shows_the_committed_rows(name):
    file, made = (PAGES | TABLES)[name]
    text = file.read_text(encoding="utf-8")
    assert made(text) == text if name in PAGES else made() in text


def test_long_training_is_no_worse_by_the_rows_of_the_page_on_checkpoints():
    first, last = ([row for row in STOPPING if row["step"] == step] for step in (900, 3600))
    assert len(first) == len(last) == 3
    assert stopping.interval(last, "style").mean >= stopping.interval(first, "style").mean
    assert stopping.interval(last, "agreement").low > -0.05


@pytest.mark.parametrize("column", recipes.COLUMNS)
def test_the_example_over_three_seeds_keeps_what_the_page_says(column):
    found = recipes.interval(recipes.read_rows(MEASUREMENTS / "example.jsonl")["data/projects/example"], column)
    assert str(found) in (DOCS / "pictures.md").read_text()


def test_the_rows_of_a_recipe_were_made_with_its_valid_settings_three_seeds_and_the_same_number_of_samples():
    chosen = recipes.recipes(300)
    assert set(ROWS) == set(chosen)
    for name, settings in chosen.items():
        assert sorted(row["seed"] for row in ROWS[name]) == [0, 1, 2]
        assert all(row["set"] == settings for row in ROWS[name])
        config = Project(EXAMPLE, settings).config.sections["train"]
        assert config.steps * config.batch_size * config.accumulate == 1200, name
        if config.schedule.shape == "cosine":
            assert config.schedule.warmup_steps + config.schedule.decay_steps == config.steps, name


def test_runs_with_regularisation_images_differ_from_the_plain_one_by_these_and_all_rates_fall_to_the_end():
    for name, (_, length) in regularisation.RUNS.items():
        settings = regularisation.settings(name, 300) | {"captions.class_word": regularisation.CLASS}
        config = Project(EXAMPLE, settings).config.sections["train"]
        assert config.schedule.warmup_steps + config.schedule.decay_steps == config.steps == 300 * length
        assert bool(config.data.regularisation) + bool(config.preservation) == (name != regularisation.PLAIN)
    config = Project(EXAMPLE, stopping.settings(3600, 6, 2)).config.sections["train"]
    assert (config.steps, config.checkpoint_every, config.validation.every, config.seed) == (3600, 600, 600, 2)
    assert config.schedule.warmup_steps + config.schedule.decay_steps == config.steps
    assert all((EXAMPLE / "images" / name).is_file() for name in config.validation.paths)


def test_no_prompt_is_about_a_subject_that_is_trained_and_each_kind_has_its_word(tmp_path):
    found = regularisation.prompts()
    assert [len(found[kind]) for kind in regularisation.KINDS] == [40, 20, 20]
    captions = (EXAMPLE / "images" / "metadata.jsonl").read_text()
    assert not any(prompt.removeprefix("{trigger}, ") in captions for prompt in found["trigger"])
    assert found["class"][0] == f"icon, {found['none'][0]}" and found["trigger"][0] == f"{{trigger}}, {found['none'][0]}"
    (tmp_path / "project.toml").write_text(slider.PROJECT)
    sections = Project(tmp_path).config.sections
    assert sections["samples"].strengths == tuple(each for each in slider.STRENGTHS if each)
    assert not set(sections["train"].slider.neutral) & set(slider.SUBJECTS)
