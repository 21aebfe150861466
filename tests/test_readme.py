"""Runs the commands and queries that the README shows."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.commands.query import run_query
from pipeline.project.project import Project
from stages.text_to_image import PIPELINE
from tests import projects

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def built(tmp_path_factory, tiny_weights) -> Path:
    folder = projects.make(tmp_path_factory.mktemp("readme") / "project", tiny_weights, images=3)
    projects.edit(folder, "\n[samples]", "\n[train.validation]\nevery = 2\n\n[samples]")
    projects.build(folder)
    return folder


@pytest.mark.parametrize("sql", blocks("sql"))
def test_a_query_of_the_readme_answers_over_a_finished_project(built, sql):
    answer = run_query(Project(built), sql, "csv")
    assert answer.splitlines()[0].count(",") >= 1


def test_the_query_for_mean_losses_returns_path_and_caption(built):
    lines = run_query(Project(built), blocks("sql")[0], "csv").splitlines()
    assert lines[0] == "path,text,draws,loss"
    assert {line.split(",")[0] for line in lines[1:]} <= {f"picture{n}.png" for n in range(3)}
    assert len(lines) > 1


def test_no_query_of_the_readme_mixes_training_and_validation_losses(built):
    hurt, levels, held = (sql for sql in blocks("sql") if "from train" in sql)
    rows = projects.content(built, "train").to_pylist()
    drawn = [row for row in rows if row["split"] == "train"]
    for sql, count in ((hurt, sum(not row["dropped"] for row in drawn)), (levels, len(drawn))):
        (total,) = run_query(Project(built), f"select sum(draws) from ({sql})", "csv").splitlines()[1:]
        assert int(total) == count < len(rows)
    steps = run_query(Project(built), f"select distinct step from ({held}) order by all", "csv").splitlines()[1:]
    assert steps == ["0", "2", "4", "6"]


def test_the_three_lines_of_python_with_duckdb_run(built):
    (code,) = (block for block in blocks("python") if "import duckdb" in block)
    assert len(code.strip().splitlines()) == 3
    code = code.replace("data/projects/example", str(built))
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "picture0.png" in out


def test_every_make_target_that_the_readme_names_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^make ([a-z]+)|`make ([a-z]+)", README, re.MULTILINE))
    assert {a or b for a, b in named} <= targets


@pytest.mark.parametrize(
    ("words", "kind"),
    [("change what a row is", "setting"), ("choose which rows exist", "selects"), ("change no row", "runtime")],
)
def test_the_readme_names_settings_by_their_true_kind(words, kind):
    (keys,) = re.findall(rf"hose that\s+{words}\s+\(([^)]*)\)", README)
    named = re.findall(r"`(\w+)\.(\w+)`", keys)
    assert named
    for stage_name, name in named:
        (field,) = (each for each in dataclasses.fields(PIPELINE.stage(stage_name).config) if each.name == name)
        assert field.metadata["kind"] == kind, f"{stage_name}.{name}"


def test_the_life_of_one_image_takes_eight_files_at_most():
    life = README.partition("### The life of one image")[2].partition("\n### ")[0]
    assert 0 < len(set(re.findall(r"`([\w/]+\.py)`", life))) <= 8


def test_every_file_that_the_readme_names_exists():
    named = re.findall(r"`((?:pipeline|stages|schemas|tests|data)/[\w/.-]*)`", README)
    assert named and [name for name in named if not (ROOT / name).exists()] == []


def test_every_stored_query_that_a_page_names_exists_and_is_asked_by_make_panel():
    from stages.retrieval.views import PANELS as OTHERS

    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "data").rglob("*.md"))))
    assert "make query NAME=" not in text
    named = re.findall(r"(?:make panel NAME=|latentmill panel )(\w+)`", text)
    assert "hurting" in named and set(named) <= {panel.name for panel in (*PIPELINE.panels, *OTHERS)}
