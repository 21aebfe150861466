"""Tests of running an experiment in several processes: each result is written as soon as it is complete."""

import json

import pytest

from data.research.experiments.processes import run_all


def work(row, folder):
    """A run of an experiment. It fails for the row 3."""
    if row["n"] == 3:
        raise ValueError("no row")
    return row | {"square": row["n"] ** 2}


def test_the_rows_of_runs_that_ended_are_in_the_file_when_a_later_one_fails(tmp_path):
    out = tmp_path / "rows.jsonl"
    out.write_text('{"n": 1, "square": 1}\n')
    with pytest.raises(ValueError, match="no row"):
        list(run_all(work, [{"n": 2}, {"n": 3}], out, 1))
    assert [json.loads(line) for line in out.read_text().splitlines()] == [{"n": n, "square": n * n} for n in (1, 2)]
