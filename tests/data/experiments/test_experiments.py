"""The experiments on micro: what they compute is what they say, and the page has no number that is not in the results."""

import json

import pytest
from PIL import Image

from data.research.experiments import experiments, report, results, runs, scoring
from data.research.experiments.charts import CHARTS
from data.research.experiments.tables import DROPOUT_LABELS
from pipeline.plots import TEXT_CHUNK, plotted
from pipeline.project import config
from pipeline.project.project import Project

RESULTS = results.read()


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_on_disk_shows_the_results_and_is_not_blank(name):
    with Image.open(report.FOLDER / name) as image:
        assert json.loads(image.info[TEXT_CHUNK]) == plotted(CHARTS[name](RESULTS))
        assert len(image.convert("RGB").getcolors(1 << 20)) > 8


def test_every_figure_of_the_page_is_there_and_small():
    text = (report.FOLDER / report.PAGE).read_text()
    figures = sorted(path.name for path in report.FOLDER.glob("*.png"))
    assert set(CHARTS) < set(figures)
    for name in figures:
        assert f"({name})" in text
        assert (report.FOLDER / name).stat().st_size <= 60_000


def test_the_results_are_of_the_pictures_that_are_there_and_of_the_runs_that_the_script_makes():
    """Where this fails, the example has changed: run data.research.experiments.experiments, and read what the page then says."""
    assert RESULTS.select(what="data")[0]["sha256"] == runs.fingerprint()
    rows = RESULTS.select(what="run")
    assert {row["run"]: row["set"] for row in rows} == {run: json.loads(json.dumps(runs.settings(run))) for run in runs.RUNS}
    pictures = RESULTS.select(what="picture")
    assert {(row["run"], row["kind"], row["guidance"], row["side"]) for row in pictures} == set(experiments.PREVIEWS)


def test_the_average_is_smoother_and_better_as_the_page_says():
    (steps, adapter), (_, average) = (RESULTS.loss_curve(one) for one in (False, True))
    assert all(b < a for step, a, b in zip(steps, adapter, average, strict=True) if step >= 40)
    half = len(steps) // 2
    assert 0.25 < results.mean_change(average[half:]) / results.mean_change(adapter[half:]) < 0.4


@pytest.mark.parametrize("run", [run for run in DROPOUT_LABELS if run != "base"])
def test_guidance_exaggerates_the_look_only_without_dropout_beside_preservation_as_the_page_says(run):
    alone = "preserved, dropout 0"
    rise = RESULTS.mean("style", run, guidance=3.0)[0] - RESULTS.mean("style", run, guidance=1.0)[0]
    assert (rise > 0.2) == (RESULTS.loss(run, caption="empty") > 0.4) == (run == alone)
    assert (RESULTS.mean("style", run, "empty")[0] < 0.2) == (run == alone)


def test_a_second_size_lowers_the_loss_and_leaves_the_look_as_the_page_says():
    one, two = ([RESULTS.loss(run, side) for side in (128, 192)] for run in ("plain", "two sizes"))
    assert two[0] < one[0] and two[1] < 0.9 * one[1]
    for column in ("style", "agreement"):
        for side in (128, 192):
            (a, error), (b, _) = (RESULTS.mean(column, run, side=side) for run in ("plain", "two sizes"))
            assert abs(a - b) < error


def test_preservation_keeps_the_base_where_there_is_no_trigger_as_the_page_says():
    for kind in ("none", "class"):
        without, held = (RESULTS.mean("moved", run, kind)[0] for run in ("plain", "preserved"))
        assert held < without / 3
        assert RESULTS.mean("style", "plain", kind)[0] > 0.5
        assert abs(RESULTS.mean("style", "preserved", kind)[0] - RESULTS.mean("style", "base", kind)[0]) < 0.1
    assert 0.5 < RESULTS.mean("style", "preserved")[0] < RESULTS.mean("style", "plain")[0]


def test_every_run_has_settings_that_the_project_takes_and_no_picture_trained_on_is_held_out_or_asked_for(tmp_path):
    folder = runs.make_project(tmp_path / "project")
    plain = config.load(folder / config.FILE).sections["train"]
    for run, changes in runs.RUNS.items():
        assert (plain == config.load(folder / config.FILE, changes).sections["train"]) == (run == "plain")
    trained, held = (runs.captions(Project(folder).resource("image_folder") / part) for part in ("", "held"))
    assert len(trained) == 24 - len(runs.HELD_OUT) and len(held) == len(runs.HELD_OUT) + runs.HELD_OUT_REFERENCES
    every = [*trained.values(), *held.values(), *runs.SUBJECTS]
    assert len(set(every)) == len(every)
    assert set(runs.SUBJECTS) < set(runs.captions(runs.EXAMPLE / "references").values())


def test_a_difference_is_the_mean_over_all_levels(tmp_path):
    for name, level in (("a.png", 10), ("b.png", 30)):
        Image.new("RGB", (4, 4), (level, level, 0)).save(tmp_path / name)
    assert scoring.difference(tmp_path / "a.png", tmp_path / "b.png") == pytest.approx(40 / 3)
