"""data/docs/macs.md: the page is what the command writes, and its budgets are those of the program."""

import re
import sys

import mlx.core as mx

from data.research.pages import macs
from stages.tuner.blockwise import device


def test_the_page_is_what_make_macs_writes():
    assert macs.FILE.read_text(encoding="utf-8") == macs.render(), "run make pages"


def test_the_table_of_the_readme_is_computed_with_the_page():
    page = macs.README.read_text(encoding="utf-8")
    assert macs.render_readme(page) == page, "run make pages"
    assert f"default size of {macs.README_SIDE} px" in page and "| 16 GB | 16 bits |" in page


def test_a_budget_of_the_page_is_the_one_that_the_program_takes_on_such_a_mac(monkeypatch):
    for size in macs.MEMORY:
        monkeypatch.setattr(sys, "platform", "darwin")
        working = int(macs.WORKING_SET * (size << 30))
        monkeypatch.setattr(mx, "device_info", lambda working=working: {"max_recommended_working_set_size": working})
        monkeypatch.setattr(device, "physical_bytes", lambda size=size: size << 30)
        monkeypatch.setattr(device, "free_bytes", lambda: None)
        assert abs(device.memory_budget() - macs.budget(size)) < 2


def test_no_cell_exceeds_the_budget_of_its_column():
    rows = [
        line.split(" | ") for line in macs.FILE.read_text(encoding="utf-8").splitlines() if re.match(r"\| .* \| \d+ \|", line)
    ]
    assert len(rows) == len(macs.MODELS) * len(macs.SIDES)
    for _, _, *cells in rows:
        for size, cell in zip(macs.MEMORY, cells, strict=True):
            assert cell.strip(" |") == "-" or float(re.search(r"([\d.]+) GB", cell)[1]) <= macs.budget(size) / 1e9 + 0.05
