"""The files that the benchmark of true shapes writes go through every stage, with and without Lance."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.memory import PROGRAM_BYTES
from tests.projects import HANG, ROOT

STAGES = ["images", "captions", "buckets", "latents", "embeddings", "train", "again", "samples"]
FORMS: tuple[tuple[str, ...], ...] = (("--fp8", "--memory", "--spare"), ())


@pytest.mark.proof("files of random weights go through every stage, in fp8 without Lance and in bfloat16")
def test_files_of_random_weights_go_through_every_stage(tmp_path: Path, cases: Callable[[int, int], int]) -> None:
    for number, options in enumerate(FORMS[: cases(1, 2)]):
        out, folder = tmp_path / f"{number}.jsonl", tmp_path / str(number)
        words = [sys.executable, "-m", "tests.bench.true_shapes", "tiny", str(folder), "--side", "64", "--out", str(out)]
        done = subprocess.run([*words, *options], cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=False)
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        assert out.read_text() == done.stdout
        assert [row["stage"] for row in rows if "stage" in row] == STAGES
        assert {row["form"] for row in rows if "form" in row} == {"bfloat16", *(["fp8"] if options else [])}
        assert all(row["load_s"] > 0 for row in rows if row.get("stage") in ("embeddings", "train", "again", "samples"))
        assert all(row["process_peak_gb"] > 0 for row in rows if "stage" in row)
        kept = {path.name for path in (folder / "weights").iterdir()} - {"tokenizer"}
        assert kept == ({"vae"} if options else {"vae", "text_encoder", "transformer"})


def test_no_recorded_load_took_more_than_the_packed_size_and_three_gigabytes() -> None:
    rows = [json.loads(line) for line in (ROOT / "data" / "measurements" / "true_shapes.jsonl").read_text().splitlines()]
    loads = [row for row in rows if "load_peak_gb" in row]
    assert {row["family"] for row in loads} == {"klein-base-4b", "klein-base-9b", "dev"}
    assert all(row["load_peak_gb"] <= row["loaded_gb"] + 3 for row in loads)
    without_gpu = [row for row in loads if "machine" in row]
    assert without_gpu and all(row["process_after_load_gb"] <= row["loaded_gb"] + 3 for row in without_gpu)


def test_the_recorded_process_that_encoded_captions_stayed_within_the_announced_memory() -> None:
    rows = [json.loads(line) for line in (ROOT / "data" / "measurements" / "true_shapes.jsonl").read_text().splitlines()]
    [row] = [row for row in rows if "machine" in row and row.get("stage") == "embeddings"]
    assert row["process_peak_gb"] <= row["estimate_gb"] + PROGRAM_BYTES / 1e9
