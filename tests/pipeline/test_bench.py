import json
import math

from click.testing import CliRunner

from pipeline import bench


def test_a_case_becomes_one_row_of_json_with_seconds_and_memory():
    case = {"family": "tiny", "width": 64, "height": 48, "bits": 4, "steps": 1, "tight": True}
    done = CliRunner().invoke(bench.main, ["--one", json.dumps(case)])
    assert done.exit_code == 0, done.output
    row = json.loads(done.output)
    assert row["tokens"] == 4 * 3 + 512
    assert 0 < row["s"] <= row["most_s"] < math.inf
    assert 0 < row["active_gb"] < row["peak_gb"]


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
