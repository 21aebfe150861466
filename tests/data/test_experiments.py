"""The experiments on micro: what they compute is what they say, and the page has no number that is not in the results."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.experiments import charts, experiments, judging, report, runs
from pipeline.project import config
from pipeline.project.project import Project


def test_the_page_is_made_of_the_results():
    text = (report.HERE / report.PAGE).read_text()
    assert report.filled(text, report.read(report.HERE)) == text


def test_every_figure_of_the_page_is_there_and_small():
    text = (report.HERE / report.PAGE).read_text()
    figures = sorted(path.name for path in report.HERE.glob("*.png"))
    assert set(report.CHARTS) < set(figures)
    for name in figures:
        assert f"({name})" in text
        assert (report.HERE / name).stat().st_size <= 60_000


def test_the_results_are_of_the_pictures_that_are_there():
    """Where this fails, the example has changed: `make experiments`, and read what the page then says."""
    assert report.read(report.HERE).only(what="data")[0]["sha256"] == runs.fingerprint()


def test_the_results_are_of_the_runs_that_the_script_makes():
    rows = report.read(report.HERE).only(what="run")
    assert {row["run"]: row["set"] for row in rows} == {run: json.loads(json.dumps(runs.settings(run))) for run in runs.RUNS}
    pictures = report.read(report.HERE).only(what="picture")
    assert {(row["run"], row["kind"], row["guidance"], row["side"]) for row in pictures} == set(experiments.PREVIEWS)


def test_the_average_is_smoother_and_better_as_the_page_says():
    (steps, adapter), (_, average) = (report.read(report.HERE).curve(one) for one in (False, True))
    assert all(b < a for step, a, b in zip(steps, adapter, average, strict=True) if step >= 40)
    half = len(steps) // 2
    assert 0.25 < report.roughness(average[half:]) / report.roughness(adapter[half:]) < 0.4


@pytest.mark.parametrize("run", [run for run in report.DROPPED if run != "base"])
def test_guidance_exaggerates_the_look_only_without_dropout_beside_preservation_as_the_page_says(run):
    results, alone = report.read(report.HERE), "preserved, dropout 0"
    rise = results.mean("style", run, guidance=3.0)[0] - results.mean("style", run, guidance=1.0)[0]
    assert (rise > 0.2) == (results.loss(run, caption="empty") > 0.4) == (run == alone)
    assert (results.mean("style", run, "empty")[0] < 0.2) == (run == alone)


def test_a_second_size_lowers_the_loss_and_leaves_the_look_as_the_page_says():
    results = report.read(report.HERE)
    one, two = ([results.loss(run, side) for side in (128, 192)] for run in ("plain", "two sizes"))
    assert two[0] < one[0] and two[1] < 0.9 * one[1]
    for column in ("style", "agreement"):
        for side in (128, 192):
            (a, error), (b, _) = (results.mean(column, run, side=side) for run in ("plain", "two sizes"))
            assert abs(a - b) < error


def test_preservation_keeps_the_base_where_there_is_no_trigger_as_the_page_says():
    results = report.read(report.HERE)
    for kind in ("none", "class"):
        without, held = (results.mean("moved", run, kind)[0] for run in ("plain", "preserved"))
        assert held < without / 3
        assert results.mean("style", "plain", kind)[0] > 0.5
        assert abs(results.mean("style", "preserved", kind)[0] - results.mean("style", "base", kind)[0]) < 0.1
    assert 0.5 < results.mean("style", "preserved")[0] < results.mean("style", "plain")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make(tmp_path_factory.mktemp("experiments") / "project")


@pytest.mark.parametrize("run", runs.RUNS)
def test_every_run_has_settings_that_the_project_takes(folder, run):
    plain, own = (config.load(folder / config.FILE, changes).sections["train"] for changes in ((), runs.RUNS[run]))
    assert (plain == own) == (run == "plain")


def test_no_picture_is_both_trained_on_and_held_out_or_asked_for(folder):
    project = Project(folder)
    trained, held = (runs.captions(project.source / part) for part in ("", "held"))
    assert len(trained) == 24 - len(runs.HELD) and len(held) == len(runs.HELD) + runs.MORE
    every = [*trained.values(), *held.values(), *runs.SUBJECTS]
    assert len(set(every)) == len(every)
    assert set(runs.SUBJECTS) < set(runs.captions(runs.EXAMPLE / "references").values())


def test_a_difference_is_the_mean_over_all_levels(tmp_path):
    for name, level in (("a.png", 10), ("b.png", 30)):
        Image.new("RGB", (4, 4), (level, level, 0)).save(tmp_path / name)
    assert judging.difference(tmp_path / "a.png", tmp_path / "b.png") == pytest.approx(40 / 3)


def test_roughness_is_the_mean_change_and_a_mean_comes_with_its_standard_error():
    assert report.roughness([1.0, 3.0, 2.0]) == 1.5
    about = {"what": "picture", "kind": "trigger", "guidance": 3.0, "side": 128}
    rows = [about | {"run": "a", "subject": str(n), "style": 5.0 + 2 * n, "moved": n} for n in range(3)]
    base = [about | {"run": "base", "subject": str(n), "style": 5.0 + n} for n in range(3)]
    results = report.Results([*rows, *base])
    assert results.mean("moved", "a") == results.mean("style", "a") == pytest.approx((1.0, 1 / 3**0.5))
    with pytest.raises(AssertionError, match="no row has"):
        results.mean("style", "b")


def test_a_chart_puts_a_higher_value_higher(tmp_path):
    series = [charts.Series("one", (200, 0, 0), [0, 1], [0.2, 0.8], joined=False)]
    charts.save([charts.Panel("t", {0.0: "a", 1.0: "b"}, "", series, 0.0, 1.0, 0.5)], tmp_path / "a.png")
    red_HW = np.all(np.abs(np.asarray(Image.open(tmp_path / "a.png").convert("RGB"), int) - (200, 0, 0)) < 40, axis=2)
    red_HW[: charts.SCALE * (charts.HEAD + charts.ABOVE)] = False  # the legend
    rows, columns = np.nonzero(red_HW)
    middle = columns.mean()
    assert rows[columns < middle].mean() > rows[columns > middle].mean()
