"""The benchmark's command: which cases its options measure, and the file that rows are added to."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.bench import environment, measure, suites
from tests.bench.cases import Case
from tests.bench.run import run

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "bench" / "gpu.sh"
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


def test_the_cases_of_a_family_cover_every_plan_and_every_width_of_weights():
    cases = list(suites.training("klein-base-4b"))
    assert {(case.width, case.plan, case.bits) for case in cases} >= {
        (px, plan, bits)
        for px in (512, 768, 1024)
        for plan, bits in (("plain", 16), ("whole", 16), ("blocks", 16), ("blocks", 8), ("blocks", 4))
    }
    assert any(case.unfused for case in cases)
    assert any((case.image_tokens + 512) % 128 for case in cases)


def test_the_option_gpu_measures_the_comparison_with_pytorch_and_the_larger_families(tmp_path, requested):
    code, output = invoke("--gpu", "--out", tmp_path / "rows.jsonl")
    assert code == 0, output
    ours = {(c.family, c.width, c.height, c.plan, c.bits, c.optimizer, c.unfused) for c in requested if c.backend == "mlx"}
    klein = {("blocks", 16, False), ("blocks", 4, False), ("blocks", 16, True), ("whole", 16, False), ("plain", 16, False)}
    wanted = {("klein-base-4b", 1024, 1024, plan, bits, "adamw", unfused) for plan, bits, unfused in klein}
    wanted |= {
        ("klein-base-4b", 512, 512, plan, bits, "adamw", False) for plan, bits in (("whole", 16), ("plain", 16), ("blocks", 4))
    }
    wanted |= {
        ("klein-base-4b", 1024, 1008, "blocks", 16, "adamw", False),
        ("klein-base-4b", 512, 528, "whole", 16, "adamw", False),
    }
    for bits in (4, 8):
        for px in (512, 768, 1024):
            wanted.add(("klein-base-9b", px, px, "blocks", bits, "adamw", False))
            wanted.add(("dev", px, px, "blocks", bits, "adamw8bit", False))
    assert ours >= wanted | {("dev", 512, 512, "blocks", 4, "adamw", False)}
    peers = {(px, how + more) for px in (512, 1024) for how in ("eager", "compiled") for more in ("", "+checkpoint")}
    assert {(c.width, c.plan) for c in requested if c.backend == "torch"} == peers
    assert {c.kind for c in requested} == {"train", "autoencoder", "text_encoder", "loader", "checksums"}
    assert requested[0] == Case(memory_limited=True)
    assert all(c.memory_limited for c in requested if c.kind == "train" and c.backend == "mlx" and c.plan == "blocks")


def test_the_options_comparison_and_large_together_are_the_option_gpu(tmp_path, requested):
    for option in ("--comparison", "--large"):
        assert invoke(option, "--out", tmp_path / "rows.jsonl")[0] == 0
    both = list(requested)
    requested.clear()
    invoke("--gpu", "--out", tmp_path / "rows.jsonl")
    assert both == requested


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
    assert "tiny           64 px        blocks                                         0.5000    2.00" in output
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
    code, output = invoke("--large", "--limit", 7, "--out", tmp_path / "rows.jsonl")
    assert code == 1 and "18 of 18 cases failed" in output and "dev            512 px" in output
    assert {row["error"] for row in read(tmp_path / "rows.jsonl")} == {"stopped after 7 s"}
    assert all(row["run"] for row in read(tmp_path / "rows.jsonl"))


def test_the_commit_is_that_of_the_code_and_empty_outside_a_checkout_or_without_git(tmp_path, monkeypatch):
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = environment.commit(ROOT / "Makefile").removesuffix("-dirty")
    assert found and found in head
    assert environment.commit(tmp_path / "bench.py") == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.commit(ROOT / "Makefile") == ""


def test_the_script_for_a_gpu_needs_a_cuda_device_and_says_how_to_get_mlx_for_it(tmp_path):
    variables = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run([SCRIPT, tmp_path], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "mlx[cuda13]" in done.stderr


def test_the_script_for_a_gpu_measures_everything_into_a_folder_and_writes_the_page(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@" >>"$LOG"\necho "# Benchmark"\n')
    python.chmod(0o755)
    variables = os.environ | {"PYTHON": str(python), "LOG": str(tmp_path / "log")}
    done = subprocess.run([SCRIPT, tmp_path], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    commands = (tmp_path / "log").read_text().splitlines()[-2:]
    assert commands == [
        f"-m tests.bench.measure --out {tmp_path}/bench.jsonl --gpu",
        f"-m tests.bench.measure --table {tmp_path}/bench.jsonl",
    ]
    assert (tmp_path / "bench.md").read_text() == "# Benchmark\n"


def test_the_bars_cover_every_stage_at_4_bits_with_pytorch_beside_and_begin_with_the_exact_encoder(tmp_path, requested):
    code, output = invoke("--bars", "--within", 480, "--out", tmp_path / "rows.jsonl")
    assert code == 0, output
    ours = [case for case in requested if case.backend == "mlx"]
    assert requested[0].kind == "autoencoder" and requested[0].exact and requested[0].dtype == "float32"
    assert {case.kind for case in ours if case.family == "klein-base-4b" and case.width == 1024} == {
        *("train", "draw", "autoencoder", "decode", "text_encoder", "exactness")
    }
    assert {case.kind for case in ours if case.stream} == {"train", "draw"}
    assert {(case.kind, case.bits, case.width) for case in ours if case.family == "dev"} == {("train", 4, 512), ("draw", 4, 512)}
    assert {case.kind for case in requested if case.backend == "torch"} >= {"draw", "autoencoder", "train"}


def test_cases_that_begin_after_the_time_of_a_run_are_left_out_and_the_last_one_gets_what_is_left(tmp_path, monkeypatch):
    clock, limits = [0.0], []

    def run_isolated(case, limit_s, environment):
        limits.append(limit_s)
        clock[0] += 40
        return asdict(case) | {"s": 0.5, "peak_gb": 2.0}

    monkeypatch.setattr(measure, "run_isolated", run_isolated)
    monkeypatch.setattr(measure.time, "monotonic", lambda: clock[0])
    code, output = invoke("--bars", "--within", 100, "--limit", 60, "--out", tmp_path / "rows.jsonl")
    assert code == 0 and limits == [60, 60, 20]
    assert len(read(tmp_path / "rows.jsonl")) == 3 and "cases were left out: 100 seconds are over" in output


def test_drawing_from_disk_and_the_difference_of_exactness_run_on_tiny_shapes():
    for case in suites.bars("tiny", "tiny", 64):
        if case.backend == "mlx" and case.kind in ("exactness", "draw"):
            row = run(case)
            assert row["kind"] == case.kind and ("rms" in row or row["peak_gb"] > 0)
