"""`latentmill captions` and `latentmill lint` from the command line."""

from __future__ import annotations

import csv
import json

import pytest

from pipeline.project.project import Project
from tests.projects import latentmill, make


@pytest.fixture(scope="module")
def project(tmp_path_factory, tiny_weights):
    folder = make(tmp_path_factory.mktemp("captions") / "project", tiny_weights, images=2)
    latentmill(folder, "run", "images")
    return folder


def texts(folder):
    rows = Project(folder).current("captions").rows().to_pylist()
    return {row["text"]: row["source"] for row in rows if row["role"] == "caption"}


def test_captions_go_into_a_file_and_the_edited_file_comes_back_and_the_image_folder_is_not_written(project, tmp_path):
    file, before = tmp_path / "out.csv", sorted((path, path.stat().st_mtime_ns) for path in (project / "images").iterdir())
    assert f"wrote 2 captions to {file}" in latentmill(project, "captions", "--edit", str(file))
    assert "exists already" in latentmill(project, "captions", "--edit", str(file), code=2)
    rows = list(csv.DictReader(file.open(encoding="utf-8", newline="")))
    assert [row["text"] for row in rows] == ["picture number 0", "picture number 1"]
    rows[0]["text"] = 'a "quoted", new\ntext'
    with file.open("w", encoding="utf-8-sig", newline="") as opened:  # as a spreadsheet writes it
        writer = csv.DictWriter(opened, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    assert "1 captions changed" in latentmill(project, "captions", "--apply", str(file))
    assert texts(project) == {'a "quoted", new\ntext': "edit", "picture number 1": "sidecar"}
    assert "0 captions changed" in latentmill(project, "captions", "--apply", str(file))
    assert before == sorted((path, path.stat().st_mtime_ns) for path in (project / "images").iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,text\na,b\n", "must have the columns image_id, position and text, got path, text"),
        ("image_id,position,text\nabc,0,x\n", "line 2: names no caption of this project"),
        ('image_id,position,text\nabc,0,"x\n', "not valid CSV"),
    ],
)
def test_a_file_that_fits_no_caption_is_one_line_and_changes_nothing(project, tmp_path, text, message):
    latentmill(project, "captions")
    before, file = texts(project), tmp_path / "wrong.csv"
    file.write_text(text)
    assert message in latentmill(project, "captions", "--apply", str(file), code=2)
    assert texts(project) == before


def test_lint_brings_the_checks_up_to_date_and_prints_the_images_with_warnings(project):
    printed = latentmill(project, "lint", "--format", "json")
    rows = json.loads(printed[printed.index("[") : printed.rindex("]") + 1])
    assert {row["path"]: row["warnings"] for row in rows}.keys() == {"picture0.png", "picture1.png"}
    assert all("small" in row["warnings"] for row in rows)
