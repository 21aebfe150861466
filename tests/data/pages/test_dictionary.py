"""The dictionary of the tables says what the schemas say."""

from __future__ import annotations

from data.research.pages.dictionary import render
from stages.text_to_image import PIPELINE


def test_every_column_of_every_table_has_a_line_with_its_meaning() -> None:
    text = render()
    for stage_name in PIPELINE.stages:
        section = text.split(f"\n## {stage_name}\n")[1].split("\n## ")[0]
        for field in PIPELINE.stage(stage_name).writes.stored:
            (line,) = [x for x in section.splitlines() if x.startswith(f"| {field.name} |")]
            assert field.metadata[b"doc"].decode() in line and ("may be null" in line) == field.nullable
            assert ("**key**" in line) == (field.name in PIPELINE.stage(stage_name).writes.key)


def test_no_line_of_a_table_has_too_many_cells() -> None:
    for line in render().splitlines():
        if line.startswith("| "):
            assert line.replace("\\|", "").count("|") == 4, line
