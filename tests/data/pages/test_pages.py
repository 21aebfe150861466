"""Generated pages, and generated parts of pages, are on disk as `make pages` writes them, in tables of equal lines."""

import json

import pytest

from data.research.pages import dictionary, footprint, machines, macs, recipe, settings, trainers

PAGES = {page.FILE: page.render for page in (dictionary, footprint, machines, macs, settings, trainers)}
PARTS = {recipe.FILE: recipe.render, macs.README: macs.render_readme}  # of the page's text


@pytest.mark.parametrize("file", [*PAGES, *PARTS], ids=lambda file: file.stem)
def test_a_page_is_what_make_pages_writes_and_no_line_of_a_table_has_more_cells_than_its_head(file):
    page = file.read_text(encoding="utf-8")
    assert page == (PAGES[file]() if file in PAGES else PARTS[file](page)), "run: make pages"
    cells = 0
    for line in page.splitlines():
        bare = line.replace("\\|", "").count("|") if line.startswith("|") else 0
        assert not cells or not bare or bare == cells, line
        cells = bare


def test_every_stage_runs_in_what_is_announced_at_its_speed():
    rows = [row for line in footprint.ROWS.read_text().splitlines() if "free_gb" in (row := json.loads(line))]
    for free, held in zip(rows[::2], rows[1::2], strict=True):
        assert footprint.label(free) == footprint.label(held)
        assert held["free_gb"] < 1.051 * free["announced_gb"] and held["s"] < 1.03 * free["s"]
