"""The estimates of memory beside the peaks that data/measurements/bench.jsonl holds, computed again from shapes for the same
device.
"""

import json
from collections import Counter
from pathlib import Path

import mlx.core as mx
import pytest

from stages.memory import Memory
from stages.models import autoencoder
from stages.text_to_image.embeddings.config import EmbeddingsConfig
from stages.text_to_image.embeddings.memory import encoder_memory
from stages.text_to_image.families import family
from stages.text_to_image.sampler import drawing_memory
from stages.text_to_image.samples.config import SamplesConfig
from stages.text_to_image.train.memory import BatchShape, ImageEstimator
from tests.bench.cases import Case
from tests.bench.labels import configuration, name, size
from tests.bench.run import training_settings

MEASUREMENTS = Path(__file__).parents[2] / "data" / "measurements"
ROWS, BALLAST = (
    [json.loads(line) for line in (MEASUREMENTS / file).read_text().splitlines()] for file in ("bench.jsonl", "footprint.jsonl")
)
CLOSE = 0.1  # share of the measured peak
FORMER = 32  # MB of a strip in rows that do not name it
STAGES = ("draw", "autoencoder", "decode", "text_encoder")


def as_the_stage_runs(row: dict) -> bool:
    """Whether a row was measured with the limits on memory and on command buffers that the stages set, on one GPU."""
    usual = row.get("buffer_mb") == ("200" if row["kind"] in ("train", "draw") else "")
    limited = row["memory_limited"] or row.get("in_flight") == 2  # two strips are the limit of the autoencoder
    return row["backend"] == "mlx" and "error" not in row and limited and usual and row.get("ranks", 1) == 1


def words(row: dict) -> str:
    strips = f", strips of {row['strip_mb']} MB" if "strip_mb" in row else ""
    return f"{row['family']} {row['kind']} {size(row)} {configuration(row) if row['kind'] == 'train' else name(row)}{strips}"


MEASURED = {words(row): row for row in ROWS if row["kind"] in ("train", *STAGES) and as_the_stage_runs(row)}


# What the driver counted beside it, of the configurations that say so.
COUNTED = {words(row): row for row in ROWS if {"footprint_gb", "announced_gb"} <= row.keys() and row["memory_limited"]}


def estimate(row: dict) -> Memory:
    """Of the configuration of a row."""
    record, pixels = family(row["family"]).without_references(), (row["width"], row["height"])
    if row["kind"] == "draw":
        packed = SamplesConfig(base_bits=row["bits"], stream_blocks=row.get("stream", False))
        return drawing_memory(record, None, packed, row["dtype"], pixels, row.get("prompts", 1))
    if row["kind"] == "text_encoder":
        return encoder_memory(EmbeddingsConfig(precision=row["dtype"], bits=row["bits"]), record, None, False)
    if row["kind"] != "train":
        given = (None, record, *pixels[::-1], 4, row["kind"] == "autoencoder", row.get("exact", False))
        return record.architecture.autoencoder_memory(*given)
    case = Case(optimizer=row["optimizer"], bits=row["bits"], rank=row["rank"], stream=row.get("stream", False))
    config = training_settings(case, record)
    shape = BatchShape(1, *pixels, row.get("text_rows") or record.text_tokens, record.architecture.pixels_per_token)
    sizes = record.architecture.transformer_config(None, record)
    plan = int(row["plan"]) if row["plan"].isdigit() else row["plan"]
    return ImageEstimator(config, record.architecture, sizes, shape).blocks(1).memory(plan)


@pytest.fixture
def cuda(monkeypatch):
    """Pretend that MLX runs on a GPU with CUDA. Shapes are traced, but nothing is computed."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setenv("MLX_CUDA_USE_CUDNN_SDPA", "1")
    monkeypatch.delenv("MLX_ENABLE_TF32", raising=False)  # products are not exact, as in the rows


@pytest.mark.parametrize("which", MEASURED)
def test_the_estimate_of_every_measured_configuration_is_within_a_tenth_of_its_peak(which, cuda, monkeypatch):
    row = MEASURED[which]
    monkeypatch.setattr(autoencoder, "GPU_STRIP_BYTES", row.get("strip_mb", FORMER) << 20)
    if row["unfused"]:
        monkeypatch.setenv("MLX_CUDA_USE_CUDNN_SDPA", "0")
    assert estimate(row).peak / 1e9 == pytest.approx(row["peak_gb"], rel=CLOSE)


@pytest.mark.parametrize("which", COUNTED)
def test_what_is_announced_for_every_counted_configuration_is_within_a_tenth_of_what_the_driver_counted(which, cuda, monkeypatch):
    row = COUNTED[which]
    if row["exact"]:
        monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    assert estimate(row).footprint / 1e9 == pytest.approx(row["footprint_gb"], rel=CLOSE)


@pytest.mark.parametrize(
    "row", [row for row in BALLAST if "free_gb" in row], ids=lambda row: f"{words(row)} {row['free_gb']:.1f}"
)
def test_what_is_announced_is_within_a_twentieth_of_what_the_driver_counted(row, cuda, monkeypatch):
    if row["exact"]:
        monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    assert estimate(row).footprint / 1e9 == pytest.approx(row["footprint_gb"], rel=0.05)


def test_the_rows_cover_every_stage_at_several_sizes_families_and_bits():
    found = MEASURED.values()
    assert len(found) >= 12 and {row["family"] for row in found} >= {"klein-base-4b", "klein-base-9b", "dev"}
    assert {row["bits"] for row in found} == {16, 8, 4}
    assert min(Counter(row["kind"] for row in found if row["kind"] in STAGES).values()) >= 2
    assert autoencoder.GPU_STRIP_BYTES >> 20 in {row.get("strip_mb") for row in found}, "the strips that a GPU uses were measured"
