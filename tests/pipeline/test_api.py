"""The Python API: the examples of the documentation, from a notebook's thread too, and what importing it costs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from pipeline import Project
from tests import projects


@pytest.fixture(scope="module")
def built(tmp_path_factory, tiny_weights) -> Path:
    folder = projects.make(tmp_path_factory.mktemp("api") / "project", tiny_weights, images=3)
    Project(folder).run("train", upstream=True, progress=False)
    return folder


@pytest.mark.proof("a program that asks in SQL, such as the example of the documents, ends with exit code 0")
def test_a_program_that_asks_in_sql_ends_with_exit_code_0(built, tmp_path, cases):
    page = (projects.ROOT / "data" / "docs" / "python.md").read_text()
    (code,) = re.findall(r"```python\n(from pipeline import Project.*?)```", page, re.DOTALL)
    code = code.replace('"data/projects/example"', repr(str(built))).replace('"train.steps": 200', '"train.steps": 6')
    until_sql = code[: code.index("\n", code.index("p.sql("))]
    environment = os.environ | {"PYTHONPATH": str(projects.ROOT)}
    for number in range(cases(1, 20)):
        # The end of the interpreter comes directly after the query, or after drawing.
        words = [sys.executable, "-c", code if number % 4 == 0 else until_sql]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, ""), f"run {number}: {done.returncode}\n{done.stderr}"
    with Image.open(tmp_path / "lion.png") as picture:
        assert picture.size == (64, 64)


def test_rows_are_arrow_and_tensors_are_memory_mapped_arrays(built):
    p = Project(built, {"train.steps": 6})
    rows = p["images"].to_arrow()
    assert isinstance(rows, pa.Table) and rows.num_rows == len(p["images"]) == 3
    key = p["latents"].to_arrow()["latent_id"][0].as_py()
    x = p["latents"][key]
    assert isinstance(x, np.ndarray) and str(x.dtype) == "bfloat16" and not x.flags.writeable
    assert list(x.shape) == p["latents"].to_arrow()["shape"][0].as_py()
    assert np.isclose(x.astype(np.float32).mean(), p["latents"].to_arrow()["mean"][0].as_py(), atol=1e-4)
    assert mx.array(x).dtype == mx.bfloat16 and mx.array_equal(mx.array(x).astype(mx.float32), mx.array(x.astype(np.float32)))
    owner: Any = x
    while getattr(owner, "base", None) is not None:
        owner = owner.base
    assert type(owner.obj if isinstance(owner, memoryview) else owner).__name__ == "mmap"
    with pytest.raises(ValueError, match="latents has no row 'no such key'; to_arrow"):
        p["latents"]["no such key"]
    with pytest.raises(TypeError, match="have no tensors; use to_arrow"):
        p["images"][key]


def test_progress_is_reported_to_a_function_or_not_at_all_and_an_object_notices_what_has_run_elsewhere(
    tmp_path, tiny_weights, capfd
):
    folder = projects.make(tmp_path / "project", tiny_weights, images=2)
    calls: list[tuple[str, int, int, str]] = []
    p = Project(folder)
    p.run("captions", upstream=True, progress=lambda *call: calls.append(call))
    assert {stage for stage, *_ in calls} >= {"images"} and all(0 <= done <= total for _, done, total, _ in calls)
    before = p["captions"]
    count = len(before)
    projects.add_image(folder, "more.png", seed=9)
    p.run("images", progress=False)
    assert capfd.readouterr() == ("", "")
    Project(folder, {"images.min_side": 32}).run("images")
    assert capfd.readouterr().out == ""
    projects.latentmill_process(folder, "run", "captions", "--only")
    assert len(p["captions"]) == p.sql("select count(*) as n from captions")["n"][0].as_py() == count + 1
    assert len(before) == before.to_arrow().num_rows == count


FORK = """
import os, sys
from pipeline import Project
p = Project(sys.argv[1])
p.run("images", progress=False)
if not os.fork():
    try:
        Project(sys.argv[1]).run("images", progress=False)
    except ValueError as error:
        print(error, flush=True)
    os._exit(0)
print(os.wait()[1])
"""


def test_a_stage_in_a_fork_of_a_process_that_used_a_project_is_one_line(tmp_path, tiny_weights):
    folder = projects.make(tmp_path / "project", tiny_weights, images=1)
    done = subprocess.run([sys.executable, "-c", FORK, str(folder)], cwd=projects.ROOT, capture_output=True, text=True)
    said, code = done.stdout.splitlines()
    assert 'get_context("spawn")' in said and code == "0"


NOTEBOOK = """
import sys, threading
failed = []
def run():
    space = {"__name__": "__main__"}
    for number, cell in enumerate(sys.argv[1:]):
        try:
            exec(compile(cell, f"cell {number}", "exec"), space)
        except BaseException as error:
            failed.append(f"cell {number}: {type(error).__name__}: {error}")
            return
thread = threading.Thread(target=run)
thread.start()
thread.join()
print("FAILED", failed)
"""


@pytest.mark.slow
def test_the_notebook_of_the_example_runs_cell_by_cell_in_a_thread(tmp_path, tiny_weights):
    folder = projects.make(tmp_path / "project", tiny_weights, images=3)
    text = (projects.ROOT / "data/projects/example/notebook.py").read_text().replace("data/projects/example", str(folder))
    parts = text.replace('"train.steps": 200', '"train.steps": 4').split("# %%")[1:]
    words = [sys.executable, "-c", NOTEBOOK, *(part for part in parts if not part.startswith(" [markdown]"))]
    done = subprocess.run(words, cwd=projects.ROOT, capture_output=True, text=True, timeout=projects.HANG)
    assert "FAILED []" in done.stdout, done.stdout + done.stderr
    assert "train 4 rows" in done.stdout and "3 images; latent" in done.stdout
    assert (folder / "lion.png").exists()
