"""Training runs are listed, compared and continued by name, whatever the present settings are."""

from __future__ import annotations

import html
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from starlette.testclient import TestClient

from pipeline import runner
from pipeline.api import Project
from pipeline.commands.catalog import run_facts
from pipeline.commands.query import answer
from pipeline.commands.rows_of_runs import RowsOfRuns
from pipeline.commands.runs import best, list_runs
from pipeline.commands.status import describe, render, state, states
from pipeline.commands.text_to_image.training import since_best
from pipeline.errors import NotBuilt, Stopped
from pipeline.page import actions, blocks
from pipeline.page.app import make_app
from pipeline.page.site import Site
from pipeline.project.outlook import ANEW
from pipeline.project.runs import find_run, find_runs, news, rename
from pipeline.store import index
from pipeline.store.table import TableFolder
from stages.models.weights import read_file
from tests import projects
from tests.pipeline.commands import tables

LR = "lr = 0.001"
CHAIN = ("images", "captions", "buckets", "latents", "embeddings")


@pytest.fixture(scope="module")
def built(tmp_path_factory, tiny_weights) -> Path:
    """The finished runs `slow` and `fast`, which differ in train.lr and have previews, and a third of 2 of 6 steps."""
    folder = projects.make(tmp_path_factory.mktemp("runs") / "project", tiny_weights, images=4)
    projects.edit(folder, "[train]\n", "[train.validation]\nshare = 0.25\nevery = 2\nsigmas = [0.5]\n\n[train]\nlr = 0.001\n")
    projects.edit(folder, "width = 64\nheight = 64\nsteps = 2", "width = 32\nheight = 32\nsteps = 1")
    projects.build(folder, *CHAIN, "train", "samples")
    rename(Project(folder), find_runs(Project(folder))[0], "slow")
    projects.edit(folder, LR, "lr = 0.005")
    projects.latentmill(folder, "train", "--only", "--name", "fast")
    projects.build(folder, "samples")
    projects.edit(folder, "lr = 0.005", "lr = 0.002")
    projects.latentmill(folder, "train", "--only", "--set", "train.stop_after_steps=2")
    return folder


@pytest.fixture
def project(built, tmp_path) -> Path:
    shutil.copytree(built, tmp_path / "project", copy_function=shutil.copy2, symlinks=True)
    return tmp_path / "project"


def test_every_run_stays_listed_with_the_settings_that_differ_and_its_rows(built):
    found = answer(Project(built), "select coalesce(name, 'third') as run_name, * from runs").to_pylist()
    rows = {row["run_name"]: row for row in found}
    assert {name: row["steps"] for name, row in rows.items()} == {"slow": 6, "fast": 6, "third": 2}
    assert {name: row["state"] for name, row in rows.items()} == {"slow": "finished", "fast": "finished", "third": "interrupted"}
    assert rows["slow"]["differs"] == "train.lr 0.001" and rows["fast"]["differs"] == "train.lr 0.005"
    assert rows["slow"]["best_step"] in (2, 4, 6) and rows["slow"]["best_loss"] > 0 and rows["slow"]["loss"] > 0
    assert rows["slow"]["wanted_steps"] == 6 and rows["slow"]["data_rows"] > 0 and "mlx" in rows["slow"]["versions"]
    assert "lr 0.001" in list_runs(Project(built)) and "6/6" in list_runs(Project(built))
    counted = "select run_name, max(step) as last from all_train where split = 'train' group by 1 order by 2, 1"
    assert [row["last"] for row in answer(Project(built), counted).to_pylist()] == [2, 6, 6]


def test_the_page_holds_the_rows_of_few_runs_at_a_time(built, monkeypatch):
    monkeypatch.setattr(index, "KEPT", (0, -1))  # of small tables, some are kept
    project = Project(built)
    runs, before, read = find_runs(project), pa.total_allocated_bytes(), []
    facts = [run_facts(project, run) for run in runs]  # first: a query goes on reading ahead
    assert facts and pa.total_allocated_bytes() <= before, "facts keep no rows"  # those of earlier tests may be freed
    counted = SimpleNamespace(committed=lambda columns: read.append(columns) or runs[0].table.committed(columns))
    rows = RowsOfRuns({(str(n), str(n)): counted for n in range(99)}, runs[0].table.schema).scanner(columns=["step"]).to_reader()
    rows.read_next_batch()
    assert len(read) < 99, "a query reads the next run when it needs it"


def test_a_query_reads_of_all_runs_only_the_columns_that_it_names(built, monkeypatch):
    read: list[list[str]] = []
    committed = TableFolder.committed

    def noted(self, columns=()):
        if self.schema.name == "train":
            read.append(sorted(columns))
        return committed(self, columns)

    monkeypatch.setattr(TableFolder, "committed", noted)
    sql = "select run_name, loss from all_train where sigma > 0.5 and split = 'train'"
    rows = answer(Project(built), sql).to_pylist()
    everything = answer(Project(built), "select * from all_train").to_pylist()
    assert read.count(["loss", "sigma", "split"]) == 3
    wanted = [row for row in everything if row["sigma"] > 0.5 and row["split"] == "train"]
    assert rows and rows == [{"run_name": row["run_name"], "loss": row["loss"]} for row in wanted]


class Ending(projects.Silent):
    """Calls `end` once so many are done."""

    def __init__(self, at: int, end: Callable[[], object] = sys.exit) -> None:
        super().__init__()
        self.at, self.end = at, end

    def progress(self, done: int, total: int, unit: str) -> None:
        if done == self.at:
            self.end()


def interrupt() -> None:
    """Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


def home(site: Site) -> str:
    return html.unescape(TestClient(make_app(site), base_url="http://127.0.0.1:8765").get("/fragment/overview").text)


def test_of_a_run_that_was_killed_status_counts_steps_and_its_rows_can_be_queried(project):
    shutil.rmtree(project / "tables" / "train")
    with pytest.raises(SystemExit):
        projects.build(project, "train", console=Ending(2))
    assert "interrupted: 2 of 6 steps are saved" in render(Project(project))
    with pytest.raises(NotBuilt, match=r"run: make train; the \d+ rows that unfinished runs have stored are in all_train$"):
        answer(Project(project), "select * from train")
    assert answer(Project(project), "select max(step) as last from all_train").to_pylist() == [{"last": 2}]
    assert "no finished run to score" in projects.latentmill(project, "evaluate", code=2)


def test_steps_are_taken_back_only_with_a_word_are_nothing_to_do_and_tell_no_speed(project):
    def newest_previews() -> str:
        return str(home(Site(project)).partition("Newest previews, ")[2].partition("<")[0])

    def change(steps: int, then: int) -> None:
        projects.edit(project, f"steps = {steps}\nrank", f"steps = {then}\nrank")

    change(6, 8)
    projects.build(project, "train", "samples")
    facts = Project(project).current("train").manifest()["facts"]["run"]
    change(8, 4)
    found = projects.planned(Project(project))
    assert (found["train"].to_do, found["samples"].to_do) == ("0 steps", "0 previews")
    assert describe(state(Project(project), "train")) == "the run has 8 steps, 4 are asked for: make train takes them back"
    for words in (("--set", "train.steps=7"), ("--run", "slow", "--set", "train.steps=7")):  # as make was told
        said = projects.latentmill(project, "status", *words)
        assert "SET=train.steps=7" in said and ("RUN=slow" in said) == ("--run" in words), said
    said = projects.latentmill(project, "train", "--only")
    assert "its adapter is that of step 4 again. For the longer one: SET=train.steps=8 with make, `export --step 8`" in said
    assert "later" not in said and "asked for" not in projects.latentmill(project, "train", "--only")
    assert newest_previews() == "step 8"
    projects.build(project, "samples")
    assert newest_previews() == "step 4", "those of step 8 are no rows of samples any more"
    projects.build(project, "images", "checks")
    following = blocks.overview(Project(project), lambda *words, **values: [])["next"]
    assert following.startswith("samples is up to date; ") and "scores: " in following
    assert "up to date;" not in following.partition(";")[2]
    change(4, 8)
    assert projects.planned(Project(project))["train"].to_do == "0 steps"
    said = projects.latentmill(project, "train", "--only")
    assert "train: 4 steps taken back from checkpoints, 8 in all" in said
    assert Project(project).current("train").manifest()["facts"]["run"] == facts
    change(8, 10)
    need = projects.planned(Project(project))["train"]
    assert need.to_do == "2 steps" and need.seconds == pytest.approx(need.missing * facts["seconds"] / facts["rows_written"])
    change(10, 7)  # without a checkpoint
    need = projects.planned(Project(project))["train"]
    again = "the run has 8 steps, 7 are asked for: step 7 again with the same result, from the checkpoint of step 6"
    assert (need.to_do, need.note) == ("1 step", again)
    assert describe(state(Project(project), "train")) == f"{need.note}: make train"
    assert "train: 1 step done, 7 in all, those up to 8 are kept (train.steps = 8 takes them back)" in projects.latentmill(
        project, "train", "--only"
    )


def test_a_run_that_ctrl_c_stopped_draws_as_it_is_and_made_shorter_than_its_states_says_what_it_computes_again(project):
    projects.build(project, "images", "train")
    with pytest.raises(Stopped):
        runner.run(projects.Project(project, ["train.steps=12"]), "train", Ending(8, interrupt))
    said = projects.latentmill(project, "export", "--set", "train.steps=12")
    assert re.search(r"note: this is the adapter of step 6; the run was stopped at step (\d+): --step \1 takes that one", said)
    assert "note" not in projects.latentmill(project, "export")
    shutil.rmtree(project / "tables" / "train")
    projects.build(project, "images")
    with pytest.raises(Stopped, match=r"1 to do. Run the same command to go on\. With what there is: latentmill samples --only$"):
        projects.build(project, "train", console=Ending(4, interrupt))
    found = {each.stage_name: describe(each) for each in states(Project(project))}
    assert found["train"] == "interrupted: 5 of 6 steps are saved: make train"
    assert next(row["state"] for row in answer(Project(project), "select * from runs where current").to_pylist()) == "interrupted"
    assert found["samples"] == "waits for train; with what there is: latentmill samples --only"
    assert projects.planned(Project(project))["train"].seconds  # the speed is known
    refused = projects.latentmill(project, "export", code=2)
    assert "its checkpoints are 2, 4, 5; choose one by --step, or run: make train PROJECT=" in refused
    said = projects.latentmill(project, "samples", "--only")
    assert "samples: 3 previews done" in said and "next: make export" not in said  # of 2, 4 and 5
    assert f"next: latentmill export -p {project} --step 5\n" in said
    assert f"next: latentmill generate -p {project} '...' --step 5\n" in said
    kept = Project(project, {"train.steps": 5})  # their adapter is not written yet
    assert describe(state(kept, "train")) == "the 5 steps are in checkpoints: make train takes them back"
    projects.edit(project, "steps = 6\nrank", "steps = 3\nrank")
    again = "the run has 5 steps, 3 are asked for: steps 1 to 3 again with the same result, "
    again += "as no checkpoint up to step 3 can go on (train.keep_states = 2)"
    assert projects.planned(Project(project))["train"].note == again  # the states of steps 4 and 5 are kept
    assert describe(state(Project(project), "train")) == f"{again}: make train"
    said = projects.latentmill(project, "train", "--only")
    assert said.count("begins again at step 1") == 1 and "train: 3 steps done, 3 in all" in said


def test_before_a_new_run_begins_status_and_home_say_so_as_plan_does_and_home_asks(project):
    def told(stage: str = "train") -> str:
        return next(describe(each) for each in states(Project(project)) if each.stage_name == stage)

    site = Site(project)

    def above_runs() -> str:
        return home(site).partition("Training runs")[0]

    projects.build(project, "images")
    projects.latentmill(project, "train", "--only", "--set", "train.steps=8")
    assert "data-sure" not in above_runs() and ">Train</button>" in above_runs()
    assert "<p>train: the run has 8 steps" in above_runs(), "not checks, which the command leaves alone"
    assert "<h2>Newest previews, step 6</h2>" in above_runs()  # of another run: this one has drawn nothing
    assert "note: this is the adapter of step 8; 6 steps are asked for: make train" in projects.latentmill(project, "export")
    said = projects.latentmill(project, "export", "--set", "train.steps=9")
    assert "this is the adapter of step 8; 9 steps are asked for: make train" in said and "that one, after 1 step\n" in said
    caption = project / "images" / "picture1.txt"
    before = caption.read_text()
    caption.write_text("other words")  # and the run is longer than is asked for
    need = projects.planned(Project(project))["train"]
    assert (need.to_do, need.note) == ("6 steps", ANEW)
    assert told() == "waits for captions; then a new run of 6 steps" and told("samples") == "waits for captions"
    for words in (("export",), ("generate", "a thing", "--steps", "1", "--set", "train.steps=4")):
        said, steps = projects.latentmill(project, *words), 4 if "--set" in words else 6
        assert re.search(rf"note: .* changed since: .*make train .*PROJECT=.* begins a new run of {steps} steps\n", said), said
    with pytest.raises(ValueError, match=r"^train: a new run of 6 steps, .* Press once more to begin it\.$"):
        actions.train(site, {})  # pressed on a page from before the change
    assert "<p>captions: 1 row missing" in above_runs()
    assert (
        'data-sure="train: a new run of 6 steps, about ' in above_runs()
        and "The runs that are there are kept.</p>" in above_runs()
    )
    caption.write_text(before)
    projects.edit(project, LR.replace("1", "2"), "lr = 0.003")
    assert told() == "a new run of 6 steps: make train" and "train: a new run of 6 steps" in above_runs()
    projects.edit(project, "lr = 0.003", LR.replace("1", "2"))
    projects.build(project, "samples")
    with pytest.raises(SystemExit):
        projects.edit(project, "steps = 6\nrank", "steps = 12\nrank")
        projects.build(project, "train", console=Ending(10))
    assert told().startswith("interrupted: 10 of 12 steps are saved")
    assert told("samples") == "waits for train" and projects.planned(Project(project))["samples"].to_do.startswith("up to ")


def test_inputs_as_before_give_the_run_of_before_and_plan_status_home_and_export_say_so(project):
    projects.edit(project, LR.replace("1", "2"), "lr = 0.005")  # the run `fast`
    projects.edit(project, "[64, 96]", "[64]")
    projects.build(project, "images", "buckets", "latents", "train")
    present = next(run.recipe for run in find_runs(Project(project)) if run.current)
    projects.latentmill(project, "clean")
    projects.edit(project, "[64]", "[64, 96]")  # whose latents are deleted
    assert projects.planned(Project(project))["latents"].missing
    for steps, to_do, note in ((6, "0 steps", "the earlier run fast as it is"), (8, "2 steps", "the earlier run fast")):
        opened = Project(project, {"train.steps": steps})
        need = projects.planned(opened)["train"]
        assert (need.to_do, need.note) == (to_do, note)
        then = note if steps == 6 else f"2 steps of {note}"
        assert next(describe(each) for each in states(opened) if each.stage_name == "train") == f"waits for buckets; then {then}"
    said = projects.latentmill(project, "export")
    assert f"note: this adapter is from the run {present}; make train PROJECT={project} goes on with the run fast\n" in said
    page = home(Site(project))
    assert "train: the earlier run fast as it is." in page and "data-sure" not in page
    assert not projects.written(projects.build(project, "buckets", "latents", "train"))["train"]
    assert next(run.label for run in find_runs(Project(project)) if run.current) == "fast"


def test_train_says_that_changed_data_begin_a_new_run_and_what_the_alternative_is_and_old_ones_are_exported_by_name(project):
    projects.edit(project, "lr = 0.002", "lr = 0.005")
    projects.add_image(project, "new.png", seed=9)
    projects.build(project, *CHAIN)
    opened = Project(project)
    assert len(list(news(opened, "train"))) == 2
    opened.config.sections["train"] = SimpleNamespace()  # of a stage without steps and without an initial adapter
    assert len(list(news(opened, "train"))) == 1
    assert "cannot go on: snapshot" in projects.latentmill(project, "train", "--only", "--run", "slow", code=2)
    files = [project / f"{name}.safetensors" for name in ("slow", "fast")]
    for file in files:
        assert "wrote" in projects.latentmill(project, "export", str(file), "--run", file.stem)
    assert files[0].read_bytes() != files[1].read_bytes()
    console = projects.Silent()
    projects.build(project, "train", console=console)
    said = " ".join(console.lines)
    assert "the data have changed since the run fast" in said and "from step 0; fast is kept" in said
    assert re.search(r" 6 steps take about (\d\.\d s|\d+ s|\d+ min \d+ s), by the speed of fast", said), said
    assert 'train.initial="tables/train/' in said
    console = projects.Silent()
    projects.build(project, "train", console=console)
    assert "the data have changed" not in " ".join(console.lines)
    for suffix in (".png", ".txt"):
        (project / "images" / f"new{suffix}").unlink()
    projects.build(project, *CHAIN, "train")  # fast is the present run again, and not the newest
    (project / "images" / "picture0.txt").write_text("other words")
    projects.build(project, *CHAIN)
    assert next(news(Project(project), "train")).startswith("the data have changed since the run fast: this is a new run")
    longer = Project(project, {"train.steps": 8})
    facts = run_facts(longer, find_run(longer, "fast"))
    assert facts["differs"] == "train.steps 6, and other data" and "steps 6, and other data" in list_runs(longer)


def test_a_marked_checkpoint_is_the_best_for_every_command_and_stays_marked_while_its_run_alone_goes_on_by_name(
    project, tmp_path
):
    def lengths() -> dict[str, int]:
        return {run.name or run.recipe: run.rows().num_rows for run in find_runs(Project(project))}

    lowest = find_run(Project(project), "slow").best_step
    step = next(step for step in (2, 4) if step != lowest)
    assert "marked as the best" in projects.latentmill(project, "best", "slow", "--mark", str(step))
    assert re.search(rf"slow .* {step}, marked", list_runs(Project(project)))
    (row,) = answer(Project(project), "select best_step, marked_step from runs where name = 'slow'").to_pylist()
    assert row == {"best_step": lowest, "marked_step": step}
    out = tmp_path / "best.safetensors"
    projects.latentmill(project, "export", str(out), "--run", "slow", "--which", "best")
    assert read_file(out)[1]["step"] == str(step)
    before = lengths()
    said = projects.latentmill(project, "train", "--only", "--run", "slow", "--set", "train.steps=8")
    assert "2 steps done, 8 in all" in said
    after = lengths()
    assert after.pop("slow") > before.pop("slow") and after == before
    slow, (third,) = find_run(Project(project), "slow"), before.keys() - {"fast"}
    assert (slow.steps.num_rows, slow.marked_step) == (8, step)
    projects.latentmill(project, "train", "--only", "--run", third[:6])
    assert find_run(Project(project), third).steps.num_rows == 6
    assert "held-out loss" in projects.latentmill(project, "best", "slow", "--by", "held-out")
    assert "has no checkpoint of step 3; its checkpoints: " in projects.latentmill(project, "best", "slow", "--mark", "3", code=2)
    assert "held-out loss" in projects.latentmill(project, "best", "slow", "--mark", "0")
    assert find_run(Project(project), "slow").marked_step is None


def test_the_page_compares_two_checkpoints_marks_one_and_gives_each_run_a_colour_of_its_own(project):
    page = TestClient(make_app(Site(project), "secret"), base_url="http://127.0.0.1")
    shown = page.get("/fragment/compare", params={"a": "base@0", "b": "slow@4"}).text
    assert "train.lr" in shown and "0.005" in shown
    (pair,) = re.findall(r'<div class="wipe"><img [^>]*alt="([^"]*)"><img [^>]*alt="([^"]*)">', shown)
    assert pair == ("a red thing, base, step 0", "a red thing, slow, step 4")
    swatches = {name: colour for colour, name in re.findall(r'background: (#\w{6})"></span>(\w+)', shown)}
    assert len(set(swatches.values())) == 3
    curves = html.unescape(page.get("/fragment/training").text)
    assert f'"line": {{"color": "{swatches["slow"]}"}}' in curves
    wrong = (("slow", "3"), ("slow", "²"), ("nothing", "4"), ("slow", "-1"))
    for run, step, code in (("slow", "4", 200), *((*each, 400) for each in wrong)):
        said = page.post("/do/mark", json={"run": run, "step": step}, headers={"x-token": "secret"})
        assert said.status_code == code and len(said.text.splitlines()) == 1
    assert find_run(Project(project), "slow").marked_step == 4
    assert re.search(r'<option value="4" selected>', page.get("/fragment/compare").text)


def test_best_goes_by_the_held_out_loss_or_by_scores_if_asked_and_refuses_without_any(built, monkeypatch):
    run = find_run(Project(built), "slow")
    said, lowest = list(best(Project(built), run)), min((loss, step) for step, loss in run.held_out.items() if step)
    assert said[0].startswith(f"slow: step {lowest[1]}, held-out loss")
    assert said[-1] == f"to export it: latentmill export --run slow --step {lowest[1]}"
    with pytest.raises(
        ValueError, match=r"slow: nothing tells its . checkpoints apart; hold data out .* score the results .* make evaluate"
    ):
        list(best(Project(built), run, "scores"))
    steps = sorted(run.checkpoints)
    monkeypatch.setattr("pipeline.commands.runs.checkpoint_scores", lambda *_: {steps[0]: 0.7, steps[-1]: 0.4})
    said = list(best(Project(built), run, "scores"))
    assert said[0].startswith(f"slow: step {steps[0]}, mean score `style` 0.7")
    assert "held-out loss" in next(best(Project(built), run, "held-out"))
    for order in ((4, 8), (8, 4)):
        scores = dict.fromkeys(order, 0.7) | {2: 0.1}
        monkeypatch.setattr("pipeline.commands.runs.checkpoint_scores", lambda *_, scores=scores: scores)
        assert next(best(Project(built), run, "scores")).startswith("slow: step 4, "), "of equal scores the earliest"
        assert since_best(scores) == 1, "so do segments"


def test_a_run_is_listed_though_its_record_is_damaged_and_is_the_present_one_only_with_its_inputs(project, tmp_path):
    run = find_run(Project(project), "slow")
    (run.table.folder / "run.json").write_text("{")
    found = find_run(Project(project), run.recipe)
    assert found.settings["train.lr"] == 0.001 and found.steps.num_rows == 6
    shutil.rmtree(project / "tables" / "embeddings")
    assert [run.current for run in find_runs(Project(project))] == [False] * 3
    assert " *" not in list_runs(Project(project))
    assert [run.recipe for run in find_runs(tables.make(tmp_path))] == [tables.RECIPE], "other tables are no runs"
