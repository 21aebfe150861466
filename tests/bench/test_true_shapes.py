"""The files that the benchmark of true shapes writes go through every stage, with and without Lance."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.memory import PROGRAM_BYTES
from stages.text_to_image.families import family
from tests.bench.true_files import path_of
from tests.projects import HANG, ROOT

STAGES = ["images", "captions", "buckets", "latents", "embeddings", "train", "again", "samples"]
FORMS: tuple[tuple[str, ...], ...] = (  # family, options
    ("flux3-tiny", "--single", "--fp8", "--memory", "--spare"),
    ("tiny",),
    ("z-image-tiny", "--single"),
    ("z-image-tiny", "--fp8", "--spare"),
    ("flux3-tiny",),
)


@pytest.mark.proof("files of random weights go through every stage: folders and single files, in fp8 and bfloat16", long=True)
def test_files_of_random_weights_go_through_every_stage(tmp_path: Path, cases: Callable[[int, int], int]) -> None:
    for number, (name, *options) in enumerate(FORMS[: cases(1, len(FORMS))]):
        out, folder = tmp_path / f"{number}.jsonl", tmp_path / str(number)
        words = [sys.executable, "-m", "tests.bench.true_shapes", name, str(folder), "--side", "64", "--out", str(out)]
        done = subprocess.run([*words, *options], cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=False)
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        assert out.read_text() == done.stdout
        assert [row["stage"] for row in rows if "stage" in row] == STAGES
        assert {row["form"] for row in rows if "form" in row} == {"bfloat16", *(["fp8"] if "--fp8" in options else [])}
        assert all(row["load_s"] > 0 for row in rows if row.get("stage") in ("embeddings", "train", "again", "samples"))
        assert [row["copy_s"] for row in rows if row.get("stage") == "again"] == [0]  # it reads the copy and writes none
        assert all(row["process_peak_gb"] > 0 for row in rows if "stage" in row)
        kept = ["autoencoder"] if "--spare" in options else ["autoencoder", "text_encoder", "transformer"]
        paths = {path_of(family(name), folder / "weights", each, "--single" in options) for each in kept}
        assert {path for path in (folder / "weights").iterdir() if path.name != "tokenizer"} == paths


def test_no_recorded_load_took_more_than_the_packed_size_and_three_gigabytes() -> None:
    rows = [json.loads(line) for line in (ROOT / "data" / "measurements" / "true_shapes.jsonl").read_text().splitlines()]
    loads = [row for row in rows if "load_peak_gb" in row]
    measured = {(row["family"], row.get("layout", "diffusers")) for row in loads}
    both = {(name, layout) for name in ("flux3-klein-base", "z-image") for layout in ("diffusers", "single files")}
    assert measured == both | {(name, "diffusers") for name in ("klein-base-4b", "klein-base-9b", "dev")}
    assert all(row["load_peak_gb"] <= row["loaded_gb"] + 3 for row in loads)
    without_gpu = [row for row in loads if "no GPU" in row.get("machine", "")]
    assert without_gpu and all(row["process_after_load_gb"] <= row["loaded_gb"] + 3 for row in without_gpu)


def test_the_recorded_process_that_encoded_captions_stayed_within_the_announced_memory() -> None:
    rows = [json.loads(line) for line in (ROOT / "data" / "measurements" / "true_shapes.jsonl").read_text().splitlines()]
    encoded = [row for row in rows if "no GPU" in row.get("machine", "") and row.get("stage") == "embeddings"]
    assert encoded
    assert all(row["process_peak_gb"] <= row["estimate_gb"] + PROGRAM_BYTES / 1e9 for row in encoded)
