import functools
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
import psutil
import pytest
from click.testing import CliRunner

from stages.text_to_image.families import family
from stages.text_to_image.train import memory_plan
from stages.tuner.adapters.lora import B
from stages.tuner.blockwise.backprop import loss_and_grads
from tests.bench import cases as bench_cases
from tests.bench import measure as bench
from tests.bench import page as bench_table
from tests.bench.cases import Case
from tests.bench.steps import Rig, plain, settings

ROOT = Path(__file__).parents[2]
GPU = {"chip": "NVIDIA X", "version": "1", "date": "2026-01-01", "commit": "abc1234"}


def said(*arguments):
    done = CliRunner().invoke(bench.main, [str(argument) for argument in arguments])
    return done.exit_code, done.output


def read(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


@pytest.fixture
def instant(monkeypatch):
    """No case runs: each is a row at once. The cases asked for, in order."""
    asked = []

    def apart(case, limit_s, about):
        asked.append(case)
        return asdict(case) | {"s": 0.5, "peak_gb": 2.0}

    monkeypatch.setattr(bench, "apart", apart)
    return asked


@pytest.mark.parametrize("plan", ["blocks", "plain"])
def test_a_case_becomes_one_row_of_json_with_seconds_and_memory(plan):
    case = {"family": "tiny", "width": 64, "height": 48, "plan": plan, "bits": 4, "steps": 1, "tight": plan != "plain"}
    code, output = said("--one", json.dumps(case))
    assert code == 0, output
    row = json.loads(output)
    assert row["tokens"] == 4 * 3 + 64
    assert 0 < row["s"] <= row["most_s"] < math.inf
    assert 0 < row["held_gb"] < row["peak_gb"]
    assert plan == "plain" or row["held_gb"] < row["foretold_gb"]
    assert row["first_s"] and row["chip"] and row["version"] and row["date"]


def test_the_plain_graph_has_the_gradients_of_our_plans():
    c = settings(base_bits=16, rank=4)
    rig = Rig(family("tiny"), c, memory_plan.Batch(1, 64, 48, 64))
    filled = {n: mx.random.normal(a.shape) / 8 if n.endswith(B) else a for n, a in rig.masters.unstack().items()}
    inputs = rig.inputs(mx.random.normal((1, rig.batch.image, rig.config.in_channels)))
    asked = functools.partial(lambda prediction, target: mx.square(prediction - target).mean((1, 2)), target=inputs["x_BLC"])
    losses_B, grads = plain(rig.model, filled, rig.scales, inputs, asked)
    true_B, true = loss_and_grads(rig.model, filled, rig.scales, inputs, asked, "whole")
    assert mx.allclose(losses_B, true_B, rtol=1e-6)
    assert set(grads) == set(true)
    for name, grad in true.items():
        assert mx.abs(grads[name] - grad).max() <= 1e-5 * mx.abs(grad).max() > 0, name


def test_the_plain_plan_of_a_rig_takes_the_plain_graph(monkeypatch):
    monkeypatch.setattr("tests.bench.steps.loss_and_grads", None)
    assert math.isfinite(Rig(family("tiny"), settings(rank=4), memory_plan.Batch(1, 64, 48, 64)).step("plain"))


def test_a_case_that_fails_is_a_row_too():
    row = bench.apart(Case(family="tiny", width=64, height=64, plan="sideways", steps=1))
    assert "plan must be whole, blocks" in row["error"]
    assert "PyTorch knows no 'sideways'" in bench.apart(Case(plan="sideways", backend="torch"))["error"]


def test_a_case_that_hangs_is_stopped_with_all_that_it_started_and_is_a_row_too(tmp_path, monkeypatch):
    hanging, said_by = tmp_path / "hanging", tmp_path / "pid"
    hanging.write_text(f"#!/bin/sh\nsleep 60 &\necho $! >{said_by}\nwait\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hanging))
    row = bench.apart(Case("tiny"), 2)
    assert row["error"] == "stopped after 2 s" and row["family"] == "tiny"
    assert gone(int(said_by.read_text()))


def gone(pid, patience=5):
    """Whether a process ends soon."""
    try:
        psutil.Process(pid).wait(patience)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_the_standard_cases_cover_every_plan_and_every_width_of_weights():
    cases = list(bench_cases.standard("klein-base-4b"))
    assert {(case.width, case.plan, case.bits) for case in cases} >= {
        (px, plan, bits)
        for px in (512, 768, 1024)
        for plan, bits in (("plain", 16), ("whole", 16), ("blocks", 16), ("blocks", 8), ("blocks", 4))
    }
    assert any(case.unfused for case in cases)
    assert any((case.image_tokens + 512) % 128 for case in cases)


def test_one_command_for_a_gpu_runs_what_the_trainer_is_judged_by_and_the_larger_families(tmp_path, instant):
    code, output = said("--gpu", "--out", tmp_path / "rows.jsonl")
    assert code == 0, output
    ours = {(c.family, c.width, c.height, c.plan, c.bits, c.optimizer, c.unfused) for c in instant if c.backend == "mlx"}
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
    assert {(c.width, c.plan) for c in instant if c.backend == "torch"} == peers
    assert {c.kind for c in instant} == {"train", "autoencoder", "text_encoder", "loader"}
    assert instant[0] == Case(tight=True)
    assert all(c.tight for c in instant if c.kind == "train" and c.backend == "mlx" and c.plan == "blocks")


def test_the_bars_and_the_larger_families_are_parts_of_that_command(tmp_path, instant):
    for part in ("--bars", "--large"):
        assert said(part, "--out", tmp_path / "rows.jsonl")[0] == 0
    parts = list(instant)
    instant.clear()
    said("--gpu", "--out", tmp_path / "rows.jsonl")
    assert parts == instant


def test_a_run_begins_without_compiled_kernels_and_its_cases_share_what_they_compile(tmp_path, monkeypatch):
    seen = []

    def apart(case, limit_s, about):
        folder = Path(about["MLX_PTX_CACHE_DIR"])
        seen.append((folder, [path.name for path in folder.iterdir()]))
        (folder / f"kernel-{len(seen)}").touch()
        return asdict(case) | {"s": 0.5, "peak_gb": 2.0}

    monkeypatch.setattr(bench, "apart", apart)
    case = '{"family": "tiny", "width": 64, "height": 64}'
    assert said("--case", case, "--case", case, "--out", tmp_path / "rows.jsonl")[0] == 0
    assert seen == [(seen[0][0], []), (seen[0][0], ["kernel-1"])] and not seen[0][0].exists()


def test_a_row_of_a_run_is_added_to_a_file_with_the_run_and_the_commit_and_shown_as_a_line(tmp_path, instant):
    rows, case = tmp_path / "new" / "rows.jsonl", '{"family": "tiny", "width": 64, "height": 64}'
    code, output = said("--case", case, "--case", case, "--out", rows, "--commit", "abc1234")
    assert code == 0 and f"2 rows added to {rows}" in output and "{" not in output
    assert "tiny           64 px        blocks                               0.5000    2.00" in output
    first, second = read(rows)
    assert first["run"] == second["run"] > "2026" and first["commit"] == "abc1234"
    assert said("--case", case, "--out", rows)[0] == 0 and len(read(rows)) == 3


def test_the_rows_lie_in_the_build_folder_if_nothing_else_is_said(tmp_path, instant, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LATENTMILL_COMMIT", "fedcba9")
    assert said()[0] == 0
    assert {row["commit"] for row in read(tmp_path / "build" / "bench.jsonl")} == {"fedcba9"}
    assert {case.family for case in instant} == {"tiny"}


def test_a_run_with_failures_ends_and_says_how_many(tmp_path, instant, monkeypatch):
    monkeypatch.setattr(bench, "apart", lambda case, limit_s, about: asdict(case) | {"error": f"stopped after {limit_s:g} s"})
    code, output = said("--large", "--limit", 7, "--out", tmp_path / "rows.jsonl")
    assert code == 1 and "17 of 17 cases failed" in output and "dev            512 px" in output
    assert {row["error"] for row in read(tmp_path / "rows.jsonl")} == {"stopped after 7 s"}
    assert all(row["run"] for row in read(tmp_path / "rows.jsonl"))


def test_a_case_with_a_field_that_is_not_there_is_refused_with_those_that_are():
    for wrong in ('{"widht": 64}', "[64]", "64 px"):
        with pytest.raises(ValueError, match=r"--case: .* (no field; there are family, width|no JSON .* object is wanted)"):
            Case.of(wrong)


def test_the_commit_is_that_of_the_code_and_none_outside_a_checkout(tmp_path, monkeypatch):
    assert bench.revision().removesuffix("-dirty") in git("rev-parse", "HEAD")
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "bench.py"))
    assert bench.revision() == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bench.revision() == ""


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_encoders_and_the_loader_are_cases_too(tmp_path, monkeypatch):
    monkeypatch.setenv("LATENTMILL_BENCH_FOLDER", str(tmp_path))
    for kind in ("loader", "autoencoder", "text_encoder"):
        row = bench.run(Case("tiny", 64, 64, kind=kind, dtype="float32", steps=1))
        assert row["kind"] == kind
        assert 0 < row["s"] < math.inf


def test_rows_become_a_page_with_a_line_per_set_up_and_a_column_per_size():
    base = asdict(Case("tiny")) | {"s": 0.5, "peak_gb": 2.0} | GPU
    rows = [base | {"width": px, "height": px, "s": px / 1000, "tight": True, "buffer_mb": "200"} for px in (512, 1024)]
    rows += [base | {"kind": "text_encoder"}, asdict(Case("dev")) | {"error": "out of memory"}]
    page = list(bench_table.page(rows))
    assert "| | 512 px | 1024 px |" in page
    assert "| blocks, tight | 0.512 / 2.0 | 1.024 / 2.0 |" in page
    assert "| text encoder, tiny, bfloat16 | 0.5 | 2 |  |" in page
    assert "- Failed: dev 1024 px, blocks: out of memory" in page
    assert page[-1] == "- NVIDIA X, MLX 1, 2026-01-01, commit abc1234"


def test_a_failure_that_was_measured_after_all_is_not_on_the_page():
    failed = asdict(Case("dev")) | {"error": "out of memory"}
    assert not any(
        "Failed" in text for text in bench_table.page([failed, asdict(Case("dev")) | {"s": 1.0, "peak_gb": 2.0} | GPU])
    )


def judged(run, peer_s=0.2):
    """A run's rows: ours, and PyTorch in `peer_s` seconds and 10 GB."""
    ours = GPU | {"run": run, "peak_gb": 11.0, "buffer_mb": "200", "tokens": 4608, "first_s": 30.0}
    rows = [asdict(Case(tight=True)) | ours | {"s": 0.25}]
    rows += [asdict(Case(tight=True, bits=4)) | ours | {"s": 0.3, "peak_gb": 5.5}]
    rows += [asdict(Case(tight=True, height=1008)) | ours | {"s": 0.26, "tokens": 4544}]
    rows += [asdict(Case(plan="plain")) | ours | {"s": 0.5, "peak_gb": 22.0, "buffer_mb": ""}]
    peer = asdict(Case(plan="compiled+checkpoint", backend="torch")) | GPU | {"run": run, "s": peer_s, "peak_gb": 10.0}
    return [*rows, peer]


def bars(rows):
    page = list(bench_table.page(rows))
    start = next(n for n, text in enumerate(page) if text.startswith("## Bars"))
    return page[start : page.index("## Training klein-base-4b: s / GB")]


def test_the_bars_stand_beside_their_peers_of_the_same_run():
    table = bars(judged("1"))
    assert "| 1024 px | blocks, tight | 0.250 | 11.0 | 30.0 | 1.25 / 1.10 | 0.50 / 0.50 |  |  |" in table
    assert "| 1024 px | blocks, 4-bit, tight | 0.300 | 5.5 | 30.0 | 1.50 / 0.55 | 0.60 / 0.25 | 1.20 / 0.50 |  |" in table
    assert "| 1024 x 1008 | blocks, tight | 0.260 | 11.0 | 30.0 |  |  |  | 1.05 |" in table
    assert "| 1024 px | PyTorch compiled+checkpoint | 0.200 | 10.0 |  |  |  |  |  |" in table


def test_a_ratio_never_spans_two_runs():
    ours, peer = judged("1")[:-1], judged("2", peer_s=0.1)[-1]
    assert [text for text in bars([*ours, peer]) if text.startswith("| 1024")] == [
        "| 1024 px | PyTorch compiled+checkpoint | 0.100 | 10.0 |  |  |  |  |  |"
    ]
    both = bars([*judged("1"), *judged("2", peer_s=0.1)])
    assert both == bars(judged("2", peer_s=0.1)) and any("2.50 / 1.10" in text for text in both)
    alone = [row | {"run": ""} for row in judged("1")]
    assert not any(text.startswith("## Bars") for text in bench_table.page(alone))


def test_the_page_on_disk_is_what_its_rows_make():
    rows = read(ROOT / "data" / "bench.jsonl")
    assert (ROOT / "data" / "bench.md").read_text() == "\n".join(bench_table.page(rows)) + "\n"


def test_the_script_for_a_gpu_needs_a_cuda_device_and_says_how_to_get_mlx_for_it(tmp_path):
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(
        [ROOT / "tests" / "bench" / "gpu.sh", tmp_path], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "mlx[cuda13]" in done.stderr


def test_the_script_for_a_gpu_measures_everything_into_a_folder_and_makes_the_page(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@" >>"$LOG"\necho "# Benchmark"\n')
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "LOG": str(tmp_path / "log")}
    done = subprocess.run(
        [ROOT / "tests" / "bench" / "gpu.sh", tmp_path], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    commands = (tmp_path / "log").read_text().splitlines()[-2:]
    assert commands == [
        f"-m tests.bench.measure --out {tmp_path}/bench.jsonl --gpu",
        f"-m tests.bench.measure --table {tmp_path}/bench.jsonl",
    ]
    assert (tmp_path / "bench.md").read_text() == "# Benchmark\n"
