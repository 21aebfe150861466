"""A pipeline that the program does not know runs through runner, store, tuner, commands and the Python API.

One of its tables has the name of a table of text_to_image. A row has two tensors of two dtypes. Its training has a loss over
a whole batch of token ids. No code outside tests/toy knows it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline import Project
from tests import projects
from tests.toy.project import make


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make(tmp_path_factory.mktemp("toy") / "project")
    Project(folder).run("train", upstream=True, progress=False)
    return folder


def test_no_code_of_the_program_names_it():
    words = ["git", "grep", "-l", r"\btoy\b", "--", "pipeline", "stages", "schemas"]
    assert not subprocess.run(words, cwd=projects.ROOT, capture_output=True, text=True, check=False).stdout


def test_its_stages_run_in_the_order_of_what_they_read(folder):
    tables = {state.stage_name: (state.rows, state.missing) for state in Project(folder).status()}
    assert list(tables) == ["lines", "tokens", "train"]
    assert tables["lines"] == tables["tokens"] == (7, 0)
    assert tables["train"][0] > 0 and not tables["train"][1]


def test_a_row_has_two_tensors_of_two_dtypes(folder):
    project = Project(folder)
    key = project["lines"].to_arrow().filter(pa.compute.equal(project["lines"].to_arrow()["text"], "six"))["line_id"][0].as_py()
    tensors = project["tokens"][key]
    assert {name: (value.dtype, value.tolist()) for name, value in tensors.items()} == {
        "ids": (np.int32, [ord(letter) for letter in "six"]),
        "rarity": (np.int8, [127, 127, 127]),
    }


def test_its_training_writes_an_adapter_and_a_loss_for_every_line_it_drew(folder):
    train = Project(folder)["train"]
    assert (train.folder / "artifacts" / "adapter.safetensors").is_file()
    assert set(train.to_arrow()["line_id"].to_pylist()) <= set(Project(folder)["lines"].to_arrow()["line_id"].to_pylist())
    assert np.isfinite(train.to_arrow()["loss"].to_numpy()).all()


def test_one_changed_line_costs_its_own_rows(folder, tmp_path):
    copy = make(tmp_path / "project")
    Project(copy).run("tokens", upstream=True, progress=False)
    (copy / "texts" / "a.txt").write_text("a red apple on a table\na yellow leaf\nthe sea at night\n")
    outcome = Project(copy).run("tokens", upstream=True, progress=False)
    assert (outcome.written, outcome.rows) == (1, 7)


def test_its_view_its_panel_and_its_tables_answer_in_sql(folder):
    project = Project(folder)
    assert project.sql("select count(*) as n from long_lines").to_pylist() == [{"n": 4}]
    assert project.panel("words").to_pylist()[0] == {"words": 1, "lines": 1}
    assert project.sql("select stage from tables where built order by stage")["stage"].to_pylist() == ["lines", "tokens", "train"]


def test_a_mistake_in_it_is_one_line(folder, tmp_path):
    copy = make(tmp_path / "project")
    (copy / "texts").rename(copy / "words")
    assert "does not exist: put text files there" in projects.latentmill(copy, "run", "lines", "--only", code=2)
