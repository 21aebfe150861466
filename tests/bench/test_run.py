"""Measuring one case: its row, its failures, and the process that it runs in."""

import math
import sys

import psutil
import pytest

from pipeline.store.shards import ShardReader
from schemas.text_to_image import LATENTS
from tests.bench.cases import Case
from tests.bench.isolate import run_isolated
from tests.bench.reading import UncheckedReader, write_random_rows
from tests.bench.run import run


@pytest.mark.parametrize("plan", ["blocks", "plain"])
def test_a_case_becomes_one_row_with_seconds_and_memory(plan):
    case = {"family": "tiny", "width": 64, "height": 48, "plan": plan, "bits": 4, "steps": 1, "memory_limited": plan != "plain"}
    row = run_isolated(Case(**case)) if plan == "blocks" else run(Case(**case))
    assert "error" not in row, row
    assert row["tokens"] == 4 * 3 + 64
    assert 0 < row["s"] <= row["most_s"] < math.inf
    assert 0 < row["held_gb"] < row["peak_gb"]
    assert plan == "plain" or row["held_gb"] < row["estimated_gb"]
    assert row["first_s"] and row["chip"] and row["version"] and row["date"]


def test_every_stage_beside_training_and_reading_rows_are_cases_too(tmp_path, monkeypatch):
    monkeypatch.setenv("LATENTMILL_BENCH_FOLDER", str(tmp_path))
    for kind in ("loader", "checksums", "autoencoder", "decode", "text_encoder", "draw"):
        row = run(Case("tiny", 64, 64, kind=kind, dtype="float32", steps=1, stream=kind == "draw"))
        assert row["kind"] == kind
        assert 0 < row.get("checked_s", row["s"]) < math.inf


def test_checksums_are_measured_on_rows_that_the_reader_checks_and_on_the_same_rows_unchecked(tmp_path):
    shape = (4, 4)
    rows = write_random_rows(tmp_path, LATENTS, (128, *shape), 2)
    shard = next((tmp_path / "shards").glob("*"))
    data = bytearray(shard.read_bytes())
    data[int(rows[LATENTS.tensors[0].offset][0].as_py())] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ValueError, match="differs from its checksum"):
        ShardReader(tmp_path, rows, LATENTS).read("00000000")
    assert UncheckedReader(tmp_path, rows, LATENTS).read("00000000").shape == (128, *shape)


def test_a_case_that_fails_is_a_row_with_an_error():
    row = run_isolated(Case(family="tiny", width=64, height=64, plan="sideways", steps=1))
    assert "plan must be whole, blocks" in row["error"]
    with pytest.raises(ValueError, match="got 'sideways'"):
        run(Case(plan="sideways", backend="torch"))


def test_a_case_that_hangs_is_killed_with_everything_that_it_started_and_is_a_row_with_an_error(tmp_path, monkeypatch):
    hanging, pid = tmp_path / "hanging", tmp_path / "pid"
    hanging.write_text(f"#!/bin/sh\nsleep 600 &\necho $! >{pid}\nwait\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hanging))
    row = run_isolated(Case("tiny"), 2)
    assert row["error"] == "stopped after 2 s" and row["family"] == "tiny"
    assert has_ended(int(pid.read_text()))


def has_ended(pid):
    """Wait for the process to end; False if it still runs after 300 seconds."""
    try:
        psutil.Process(pid).wait(300)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_an_unknown_field_of_a_case_is_refused_with_the_known_ones():
    for wrong in ('{"widht": 64}', "[64]", "64 px"):
        with pytest.raises(ValueError, match=r"--case (has no field .*; there are family, width|must be a JSON object such as)"):
            Case.from_json(wrong)
