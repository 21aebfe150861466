"""The benchmark's page: its tables, its ratios, and that it is made from the rows in data/measurements/bench.jsonl."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.bench import retriever
from tests.bench.cases import Case
from tests.bench.page import page

DATA = Path(__file__).parents[2] / "data"
GPU = {"chip": "NVIDIA X", "version": "1", "date": "2026-01-01", "commit": "abc1234"}


@pytest.mark.parametrize(("name", "made"), [("bench", page), ("bench-retriever", retriever.page)])
def test_the_page_on_disk_is_made_from_its_rows(name, made):
    rows = [json.loads(text) for text in (DATA / "measurements" / f"{name}.jsonl").read_text().splitlines()]
    assert (DATA / "docs" / f"{name}.md").read_text() == "\n".join(made(rows)) + "\n"


def test_rows_become_a_page_with_a_line_per_configuration_a_column_per_size_and_what_failed_and_was_never_measured():
    base = asdict(Case("tiny")) | {"s": 0.5, "peak_gb": 2.0} | GPU
    limited = base | {"memory_limited": True, "buffer_mb": "200"}
    rows = [limited | {"width": px, "height": px, "s": px / 1000} for px in (512, 1024)]
    rows += [base | {"kind": "text_encoder"}, base | {"kind": "velocity"}, asdict(Case("dev")) | {"error": "out of memory"}]
    lines = list(page(rows))
    assert "| | 512 px | 1024 px |" in lines
    assert "| blocks, memory-limited | 0.512 / 2.0 | 1.024 / 2.0 |" in lines
    assert "| text encoder, tiny, bfloat16 | 0.5 | 2 |  |" in lines
    assert "- Failed: dev 1024 px, blocks: out of memory" in lines
    assert lines[-1] == "- NVIDIA X, MLX 1, 2026-01-01, commit abc1234" and not any("velocity" in line for line in lines)
    measured = [*rows, asdict(Case("dev")) | {"s": 1.0, "peak_gb": 2.0} | GPU]
    assert not any("Failed" in line for line in page(measured)), "it was measured in another run"


def run_with_pytorch(run, torch_s=0.2):
    """Four of ours, and PyTorch's in `torch_s` seconds and 10 GB."""
    ours = GPU | {"run": run, "peak_gb": 11.0, "buffer_mb": "200", "tokens": 4608, "first_s": 30.0}
    rows = [asdict(Case(memory_limited=True)) | ours | {"s": 0.25}]
    rows += [asdict(Case(memory_limited=True, bits=4)) | ours | {"s": 0.3, "peak_gb": 5.5}]
    rows += [asdict(Case(memory_limited=True, height=1008)) | ours | {"s": 0.26, "tokens": 4544}]
    rows += [asdict(Case(plan="plain")) | ours | {"s": 0.5, "peak_gb": 22.0, "buffer_mb": ""}]
    torch = asdict(Case(plan="compiled+checkpoint", backend="torch")) | GPU | {"run": run, "s": torch_s, "peak_gb": 10.0}
    return [*rows, torch]


def comparison_section(rows):
    lines = list(page(rows))
    start = next(n for n, line in enumerate(lines) if line.startswith("## Comparison"))
    return lines[start : next(n for n, line in enumerate(lines) if line.startswith("## Training klein-base-4b"))]


def test_the_comparison_has_ratios_to_other_rows_of_its_run():
    table = comparison_section(run_with_pytorch("1"))
    assert "| 1024 px | blocks, memory-limited | 0.250 | 11.0 | 30.0 | 1.25 / 1.10 | 0.50 / 0.50 |  |  |" in table
    assert (
        "| 1024 px | blocks, 4-bit, memory-limited | 0.300 | 5.5 | 30.0 | 1.50 / 0.55 | 0.60 / 0.25 | 1.20 / 0.50 |  |" in table
    )
    assert "| 1024 x 1008 | blocks, memory-limited | 0.260 | 11.0 | 30.0 |  |  |  | 1.05 |" in table
    assert "| 1024 px | PyTorch compiled+checkpoint | 0.200 | 10.0 |  |  |  |  |  |" in table


def test_a_ratio_never_spans_two_runs():
    ours, torch = run_with_pytorch("1")[:-1], run_with_pytorch("2", torch_s=0.1)[-1]
    assert [line for line in comparison_section([*ours, torch]) if line.startswith("| 1024")] == [
        "| 1024 px | PyTorch compiled+checkpoint | 0.100 | 10.0 |  |  |  |  |  |"
    ]
    both = comparison_section([*run_with_pytorch("1"), *run_with_pytorch("2", torch_s=0.1)])
    assert both == comparison_section(run_with_pytorch("2", torch_s=0.1)) and any("2.50 / 1.10" in line for line in both)
    without_run = [row | {"run": ""} for row in run_with_pytorch("1")]
    assert not any(line.startswith("## Comparison") for line in page(without_run))


def test_every_stage_of_a_family_stands_beside_what_the_driver_counted_and_pytorch_in_the_same_run():
    ours = GPU | {
        "run": "1",
        "memory_limited": True,
        "buffer_mb": "200",
        "peak_gb": 7.0,
        "footprint_gb": 8.0,
        "announced_gb": 8.4,
    }
    torch = asdict(Case("z-image", plan="compiled+checkpoint", backend="torch")) | GPU | {"run": "1", "s": 0.4, "peak_gb": 9.0}
    rows = [asdict(Case("z-image", bits=8)) | ours | {"s": 0.44}, torch | {"footprint_gb": 10.0}]
    rows.append(asdict(Case("z-image", kind="text_encoder")) | ours | {"s": 0.1})
    rows.append(torch | {"run": "0", "s": 9.0, "footprint_gb": 10.0})
    lines = list(page(rows))
    assert "| 1024 px | train, blocks, 8-bit | 0.440 | 7.00 | 8.00 | 8.40 | 1.05 | 0.400 | 1.10 | 10.00 |" in lines
    assert "|  | text encoder, bfloat16 | 0.100 | 7.00 | 8.00 | 8.40 | 1.05 |  |  |  |" in lines
    assert not any(line.startswith("## Comparison: z-image") for line in lines)


def test_checksums_stand_beside_our_shortest_step_of_one_process_at_the_same_family_and_size():
    times = {"s": 0.0003, "alone_s": 0.0006, "unchecked_s": 0.001, "checked_s": 0.0013, "waited_unchecked_s": 0.00005}
    times |= {"waited_s": 0.00006, "step_s": 0.05}
    checksums = asdict(Case("tiny", 512, 512, kind="checksums")) | GPU | times | {"sample_bytes": 8_000_000}
    step = asdict(Case("tiny", 512, 512)) | GPU | {"s": 0.06, "peak_gb": 2.0}
    others = [
        step | {"s": 0.07},
        step | {"s": 0.01, "ranks": 2},
        step | {"s": 0.01, "backend": "torch"},
        step | {"s": 0.01, "width": 64},
    ]
    line = next(line for line in page([checksums, *others, step]) if line.startswith("| tiny, 512 px | 8.00"))
    assert line.startswith(
        "| tiny, 512 px | 8.00 | 1.000 | 1.300 | 0.300 | 0.600 | 0.050 | 0.060 | 50 | 60.0, blocks | 0.10% | 0.50% | NVIDIA X"
    )
    assert not any("Checksums beside" in line for line in page([step, checksums | {"family": "dev"}]))
