"""The files that the benchmark of true shapes writes go through every stage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.projects import HANG, ROOT


@pytest.mark.parametrize("options", [(), ("--fp8",)], ids=["bfloat16", "fp8"])
def test_files_of_random_weights_go_through_every_stage(options: tuple[str, ...], tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.bench.true_shapes", "tiny", str(tmp_path), "--side", "64", *options]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    stages = ["images", "captions", "buckets", "latents", "embeddings", "train", "samples"]
    assert [row.get("stage") for row in rows] == [None, *stages]
    assert all(row["process_peak_gb"] > 0 for row in rows[1:])
