"""A pipeline that the program does not know runs through runner, store, tuner, commands and the Python API.

One of its tables has the name of a table of text_to_image. A row has two tensors of two dtypes. Its training has a loss over
a whole batch of token ids. No code outside tests/toy knows it.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np

from pipeline import Project
from tests import projects
from tests.toy.project import make


def test_no_code_of_the_program_names_it() -> None:
    words = ["git", "grep", "-l", r"\btoy\b", "--", "pipeline", "stages", "schemas"]
    assert not subprocess.run(words, cwd=projects.ROOT, capture_output=True, text=True, check=False).stdout


def test_a_row_has_two_tensors_of_two_dtypes_and_one_changed_line_costs_its_own_row(tmp_path: Path) -> None:
    folder = make(tmp_path / "project")
    project = Project(folder)
    project.run("tokens", upstream=True, progress=False)
    (key,) = project.sql("select line_id from lines where text = 'six'")["line_id"].to_pylist()
    tensors = project["tokens"][key]
    assert {name: (value.dtype, value.tolist()) for name, value in tensors.items()} == {
        "ids": (np.int32, [ord(letter) for letter in "six"]),
        "rarity": (np.int8, [127, 127, 127]),
    }
    (folder / "texts" / "a.txt").write_text("a red apple on a table\na yellow leaf\nthe sea at night\n")
    outcome = Project(folder).run("tokens", upstream=True, progress=False)
    assert (outcome.written, outcome.rows) == (1, 7)
