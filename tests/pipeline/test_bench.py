import json
import math
from dataclasses import asdict
from pathlib import Path

from click.testing import CliRunner

from pipeline import bench, bench_table


def test_a_case_becomes_one_row_of_json_with_seconds_and_memory():
    case = {"family": "tiny", "width": 64, "height": 48, "bits": 4, "steps": 1, "tight": True}
    done = CliRunner().invoke(bench.main, ["--one", json.dumps(case)])
    assert done.exit_code == 0, done.output
    row = json.loads(done.output)
    assert row["tokens"] == 4 * 3 + 64
    assert 0 < row["s"] <= row["most_s"] < math.inf
    assert 0 < row["held_gb"] < row["peak_gb"]
    assert row["held_gb"] < row["foretold_gb"]
    assert row["chip"] and row["version"] and row["date"]


def test_a_case_that_fails_is_a_row_too():
    row = bench.apart(bench.Case(family="tiny", width=64, height=64, plan="sideways", steps=1))
    assert "plan must be whole, blocks" in row["error"]


def test_the_standard_cases_cover_every_plan_and_every_width_of_weights():
    cases = list(bench.standard("klein-base-4b"))
    assert {(case.width, case.plan, case.bits) for case in cases} >= {
        (px, plan, bits)
        for px in (512, 768, 1024)
        for plan, bits in (("whole", 16), ("blocks", 16), ("blocks", 8), ("blocks", 4))
    }
    assert any(case.unfused for case in cases)
    assert any((case.image_tokens + 512) % 128 for case in cases)


def test_encoders_and_the_loader_are_cases_too(tmp_path, monkeypatch):
    monkeypatch.setenv("LATENTMILL_BENCH_FOLDER", str(tmp_path))
    for kind in ("loader", "autoencoder", "text_encoder"):
        row = bench.run(bench.Case("tiny", 64, 64, kind=kind, dtype="float32", steps=1))
        assert row["kind"] == kind
        assert 0 < row["s"] < math.inf


def test_rows_become_a_page_with_a_line_per_set_up_and_a_column_per_size():
    base = asdict(bench.Case("tiny")) | {"s": 0.5, "peak_gb": 2.0, "chip": "NVIDIA X", "version": "1", "date": "2026-01-01"}
    rows = [base | {"width": px, "height": px, "s": px / 1000, "tight": True, "buffer_mb": "200"} for px in (512, 1024)]
    rows += [base | {"kind": "text_encoder"}, asdict(bench.Case("dev")) | {"error": "out of memory"}]
    page = list(bench_table.page(rows))
    assert "| | 512 px | 1024 px |" in page
    assert "| blocks, tight | 0.512 / 2.0 | 1.024 / 2.0 |" in page
    assert "| text encoder, tiny, bfloat16 | 0.5 | 2 |  |" in page
    assert "Failed: dev 1024 px, blocks: out of memory" in page
    assert page[-1] == "- NVIDIA X, MLX 1, 2026-01-01"


def test_the_page_on_disk_is_what_its_rows_make():
    folder = Path(__file__).parents[2] / "data"
    rows = [json.loads(line) for line in (folder / "bench.jsonl").read_text().splitlines()]
    assert (folder / "bench.md").read_text().endswith("\n".join(bench_table.page(rows)) + "\n")
