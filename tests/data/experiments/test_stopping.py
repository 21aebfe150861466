"""The experiment about stopping: its settings are valid, and its table has a line for each checkpoint."""

from pathlib import Path

from data.research.experiments import stopping
from data.research.experiments.recipes import COLUMNS, EXAMPLE
from data.research.experiments.report import with_table
from pipeline.project.project import Project

DATA = Path(__file__).parents[3] / "data"


def test_a_run_measures_and_keeps_a_checkpoint_at_equal_distances_and_its_rate_falls_to_the_end():
    config = Project(EXAMPLE, stopping.settings(3600, 6, 2)).config.sections["train"]
    assert (config.steps, config.checkpoint_every, config.validation.every, config.seed) == (3600, 600, 600, 2)
    assert config.schedule.warmup_steps + config.schedule.decay_steps == config.steps
    assert all((EXAMPLE / "images" / name).is_file() for name in config.validation.paths)


def test_the_table_has_a_line_for_each_checkpoint_with_the_mean_over_the_seeds():
    scores = {name: [[0.0, 1.0]] * 4 for name in COLUMNS}
    rows = [{"seed": loss, "step": step, "held_out_loss": loss, "scores": scores} for loss in (0.2, 0.4) for step in (600, 1200)]
    lines = stopping.table(rows).splitlines()[2:]
    assert [line.split(" | ")[0] for line in lines] == ["| 600", "| 1200"]
    assert all("0.300 (0.200 to 0.400)" in line and "1.000 (1.000 to 1.000)" in line for line in lines)


def test_the_page_on_checkpoints_is_made_from_the_rows_and_long_training_is_no_worse_by_them():
    rows = stopping.read_rows(DATA / "measurements" / "stopping.jsonl")
    text = (DATA / "docs" / "checkpoints.md").read_text()
    assert with_table(text, "stopping", stopping.table(rows)) == text
    first, last = ([row for row in rows if row["step"] == step] for step in (900, 3600))
    assert len(first) == len(last) == 3
    assert stopping.interval(last, "style").mean >= stopping.interval(first, "style").mean
    assert stopping.interval(last, "agreement").low > -0.05
