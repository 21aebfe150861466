"""data/docs/macs.md: the page is what the command writes, and its budgets are those of the program."""

import json
import re
import sys
from dataclasses import asdict, replace

import mlx.core as mx
import pytest

from data.research.pages import macs
from stages.tuner.blockwise import device
from tests.pipeline.commands.test_doctor import MAC


def test_a_budget_of_the_page_is_the_one_that_the_program_takes_on_such_a_mac(monkeypatch):
    for size in macs.MEMORY:
        monkeypatch.setattr(sys, "platform", "darwin")
        working = int(macs.WORKING_SET * (size << 30))
        monkeypatch.setattr(mx, "device_info", lambda working=working: {"max_recommended_working_set_size": working})
        monkeypatch.setattr(device, "physical_bytes", lambda size=size: size << 30)
        monkeypatch.setattr(device, "free_bytes", lambda: None)
        assert abs(device.memory_budget() - macs.budget(size)) < 2


def test_the_table_of_the_readme_is_of_the_default_size():
    page = macs.README.read_text(encoding="utf-8")
    assert f"default size of {macs.README_SIDE} px" in page and "| 16 GB | 16 bits |" in page


def test_no_cell_exceeds_the_budget_of_its_column():
    rows = [
        line.split(" | ") for line in macs.FILE.read_text(encoding="utf-8").splitlines() if re.match(r"\| .* \| \d+ \|", line)
    ]
    assert len(rows) == len(macs.MODELS) * len(macs.SIDES)
    for _, _, *cells, _ in rows:
        for size, cell in zip(macs.MEMORY, cells, strict=True):
            assert cell.strip(" |") == "-" or float(re.search(r"([\d.]+) GB", cell)[1]) <= macs.budget(size) / 1e9 + 0.05


def test_files_of_doctor_fill_the_column_measured_and_one_of_another_machine_is_refused(tmp_path, monkeypatch):
    probes = [
        {"probe": "training 512 px", "s": 2.5, "plan": "whole", "peak_bytes": 9_100_000_000},
        {"probe": "training 1024 px", "error": "needs about 12 GB"},
    ]

    def write(name: str, **change: object) -> None:
        found = {"machine": asdict(replace(MAC, **change)), "family": "klein-base-4b", "probes": probes}
        (tmp_path / f"{name}.json").write_text(json.dumps(found))

    monkeypatch.setattr(macs, "MEASURED", tmp_path)
    monkeypatch.setattr(macs, "MODELS", macs.MODELS[:1])
    write("a")
    write("b", chip="Apple M4", memory=16 << 30)
    rows = [line for line in macs.table().splitlines() if "GB: " in line]
    assert len(rows) == 1 and rows[0].startswith("| FLUX.2 klein base 4B | 512 |")
    assert rows[0].endswith("| Apple M3 Max 64 GB: 2.5 s, whole, 9.1 GB; Apple M4 16 GB: 2.5 s, whole, 9.1 GB |")
    for change in ({"backend": "CPU"}, {"chip": "Apple M1 (Virtual)"}, {"device": "Apple Paravirtual device"}, {"macos": ""}):
        write("c", **change)
        with pytest.raises(ValueError, match=r"c\.json: must be measured with Metal on a Mac"):
            macs.table()
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(ValueError, match="not a file of latentmill doctor --measure"):
        macs.table()
