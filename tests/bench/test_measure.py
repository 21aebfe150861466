"""The benchmark's command: which cases its options measure, and the file that rows are added to."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.bench import environment, measure
from tests.bench.cases import TORCH_PLANS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "bench" / "gpu.sh"
STAGES = ("train", "draw", "autoencoder", "decode", "text_encoder")
SMALL = '{"family": "tiny", "width": 64, "height": 64}'


def invoke(*arguments):
    """(exit code, output)."""
    done = CliRunner().invoke(measure.main, [str(argument) for argument in arguments])
    return done.exit_code, done.output


def read(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


@pytest.fixture
def requested(monkeypatch):
    """Replace every measurement by a row at once; the list of the cases that were requested, in order."""
    cases = []

    def run_isolated(case, limit_s, environment):
        cases.append(case)
        return asdict(case) | {"s": 0.5, "peak_gb": 2.0}

    monkeypatch.setattr(measure, "run_isolated", run_isolated)
    return cases


def test_the_option_gpu_measures_klein_4b_beside_pytorch_dev_and_9b_with_few_bits_and_every_kind_of_row(tmp_path, requested):
    code, output = invoke("--gpu", "--out", tmp_path / "rows.jsonl")
    assert code == 0, output
    assert {"klein-base-4b", "klein-base-9b", "dev"} == {case.family for case in requested}
    assert {case.bits for case in requested if case.family != "klein-base-4b"} == {4, 8}
    assert {case.plan for case in requested if case.backend == "torch"} == set(TORCH_PLANS)
    assert {case.kind for case in requested} == {"train", "autoencoder", "text_encoder", "loader", "checksums"}
    assert any((case.image_tokens + 512) % 128 for case in requested) and any(case.unfused for case in requested)
    assert all(c.memory_limited for c in requested if c.kind == "train" and c.backend == "mlx" and c.plan == "blocks")


def test_the_shapes_of_a_family_are_every_stage_at_two_sizes_and_three_widths_with_pytorch_beside_where_it_is(
    tmp_path, requested, monkeypatch
):
    assert invoke("--shapes", "klein-base-4b", "--out", tmp_path / "rows.jsonl")[0] == 0
    found = {(case.kind, case.backend) for case in requested}
    assert found == {(kind, backend) for kind in STAGES for backend in ("mlx", "torch")} - {("decode", "torch")}
    wanted = {(kind, bits, px) for kind in ("train", "draw") for bits in (16, 8, 4) for px in (512, 1024)}
    assert wanted <= {(case.kind, case.bits, case.width) for case in requested}
    requested.clear()
    monkeypatch.setattr(measure.importlib.util, "find_spec", lambda name: None)
    assert invoke("--shapes", "klein-base-4b", "--out", tmp_path / "rows.jsonl")[0] == 0
    assert requested and {case.backend for case in requested} == {"mlx"}


def test_a_run_starts_without_compiled_kernels_and_its_cases_share_those_that_they_compile(tmp_path, monkeypatch):
    seen = []

    def run_isolated(case, limit_s, environment):
        folder = Path(environment["MLX_PTX_CACHE_DIR"])
        seen.append((folder, [path.name for path in folder.iterdir()]))
        (folder / f"kernel-{len(seen)}").touch()
        return asdict(case) | {"s": 0.5, "peak_gb": 2.0}

    monkeypatch.setattr(measure, "run_isolated", run_isolated)
    assert invoke("--case", SMALL, "--case", SMALL, "--out", tmp_path / "rows.jsonl")[0] == 0
    assert seen == [(seen[0][0], []), (seen[0][0], ["kernel-1"])] and not seen[0][0].exists()


def test_a_row_is_added_to_the_file_with_its_run_and_commit_and_printed_as_a_line(tmp_path, requested):
    rows = tmp_path / "new" / "rows.jsonl"
    code, output = invoke("--case", SMALL, "--case", SMALL, "--out", rows, "--commit", "abc1234")
    assert code == 0 and f"2 rows added to {rows}" in output and "{" not in output
    assert re.search(r"tiny +64 px +blocks +0\.5000 +2\.00", output)
    first, second = read(rows)
    assert first["run"] == second["run"] > "2026" and first["commit"] == "abc1234"
    assert invoke("--case", SMALL, "--out", rows)[0] == 0 and len(read(rows)) == 3


def test_without_options_small_cases_are_measured_into_the_build_folder(tmp_path, requested, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LATENTMILL_COMMIT", "fedcba9")
    assert invoke()[0] == 0
    assert {row["commit"] for row in read(tmp_path / "build" / "bench.jsonl")} == {"fedcba9"}
    assert {case.family for case in requested if case.kind != "checksums"} == {"tiny"}  # others would need their weights' memory
    assert ("klein-base-4b", 512) in {(case.family, case.width) for case in requested if case.kind == "checksums"}


def test_a_run_with_failures_exits_with_1_and_says_how_many(tmp_path, requested, monkeypatch):
    monkeypatch.setattr(
        measure, "run_isolated", lambda case, limit_s, environment: asdict(case) | {"error": f"stopped after {limit_s:g} s"}
    )
    code, output = invoke("--case", SMALL, "--case", SMALL, "--limit", 7, "--out", tmp_path / "rows.jsonl")
    assert code == 1 and "2 of 2 cases failed" in output and "stopped after 7 s" in output
    assert {row["error"] for row in read(tmp_path / "rows.jsonl")} == {"stopped after 7 s"}


def test_the_commit_is_that_of_the_code_and_empty_outside_a_checkout_or_without_git(tmp_path, monkeypatch):
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = environment.commit(ROOT / "Makefile").removesuffix("-dirty")
    assert found and found in head
    assert environment.commit(tmp_path / "bench.py") == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.commit(ROOT / "Makefile") == ""


def test_the_script_for_a_gpu_measures_everything_into_a_folder_and_writes_the_page_and_without_cuda_says_what_to_install(
    tmp_path,
):
    variables = os.environ | {"PYTHON": sys.executable, "LOG": str(tmp_path / "log")}
    done = subprocess.run([SCRIPT, tmp_path], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "mlx[cuda13]" in done.stderr
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@" >>"$LOG"\necho "# Benchmark"\n')
    python.chmod(0o755)
    done = subprocess.run(
        [SCRIPT, tmp_path], env=variables | {"PYTHON": str(python)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    commands = (tmp_path / "log").read_text().splitlines()[-2:]
    assert commands == [
        f"-m tests.bench.measure --out {tmp_path}/bench.jsonl --gpu",
        f"-m tests.bench.measure --table {tmp_path}/bench.jsonl",
    ]
    assert (tmp_path / "bench.md").read_text() == "# Benchmark\n"
