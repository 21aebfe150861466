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


def test_a_row_has_two_tensors_of_two_dtypes(folder):
    project = Project(folder)
    key = project["lines"].to_arrow().filter(pa.compute.equal(project["lines"].to_arrow()["text"], "six"))["line_id"][0].as_py()
    tensors = project["tokens"][key]
    assert {name: (value.dtype, value.tolist()) for name, value in tensors.items()} == {
        "ids": (np.int32, [ord(letter) for letter in "six"]),
        "rarity": (np.int8, [127, 127, 127]),
    }


def test_one_changed_line_costs_its_own_rows(folder, tmp_path):
    copy = make(tmp_path / "project")
    Project(copy).run("tokens", upstream=True, progress=False)
    (copy / "texts" / "a.txt").write_text("a red apple on a table\na yellow leaf\nthe sea at night\n")
    outcome = Project(copy).run("tokens", upstream=True, progress=False)
    assert (outcome.written, outcome.rows) == (1, 7)
