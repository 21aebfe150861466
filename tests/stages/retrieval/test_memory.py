"""Forecasts of the stages of a retriever beside what they take, and what `latentmill plan` says of them."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from pipeline.project.outlook import announcement, forecast
from pipeline.project.project import Project
from tests import projects
from tests.stages.retrieval.project import CONFIG, run

TEXT = """
[pairs]
split = "unit"
valid = 0.2
test = 0.2
max_leak = 1.0

[tokens]
document_tokens = {}

[train]
steps = 1
precision = "float32"
"""
LINES = "\n".join(f"    total_{number} = sum(value * {number} for value in values)" for number in range(30))
FUNCTION = '''
def weigh_{0}(values, {0}_limit):
    """Weigh the {0} of a list and keep the sums of {0} by rank."""
{1}
    return [{0}_limit, "{0}"]
'''
THINGS = [size + thing for size in ("small", "large", "red", "old") for thing in ("bag", "box", "row", "set", "heap")]
TRAIN = {"train.batch_size": 8, "train.memory": "whole"}
# What runs: tokens of a document, the stage, its settings.
CASES: list[tuple[int, str, dict[str, Any]]] = [
    (128, "vectors", {}),
    (64, "train", TRAIN | {"train.rank": 64, "train.targets": ["*"]}),
    (64, "train", TRAIN | {"train.micro_batch": 2, "train.base_bits": 4}),
    (320, "vectors", {}),
    (128, "negatives", {"negatives.encoder": "base"}),
    (64, "train", TRAIN),
    (128, "train", TRAIN | {"train.memory": "blocks"}),
    (128, "train", TRAIN | {"train.micro_batch": 2}),
]
LONG = pytest.mark.proof("the estimate of encoding and of training a retriever is within a tenth of the peak", long=True)


@pytest.fixture(scope="module")
def tokenised(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A function: the tokens of a document -> a project of long functions with the bundled encoder, built up to its tokens."""

    @functools.cache
    def project(tokens: int) -> Path:
        folder = tmp_path_factory.mktemp("long") / "project"
        (folder / "code").mkdir(parents=True)
        (folder / "code" / "long.py").write_text("\n".join(FUNCTION.format(thing, LINES) for thing in THINGS))
        config = CONFIG.replace('"tiny"', '"retriever-micro"').replace("commit_seconds = 0.0\n", "")
        (folder / "project.toml").write_text(config + TEXT.format(tokens))
        run(folder, "sources", "units", "pairs", "tokens")
        return folder

    return project


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES[:3], *(pytest.param(case, marks=LONG) for case in CASES[3:])], ids=str)
def test_the_estimate_of_encoding_and_of_training_is_within_a_tenth_of_the_measured_peak(
    case: tuple[int, str, dict[str, Any]], tokenised: Callable[[int], Path]
) -> None:
    tokens, name, settings = case
    folder = tokenised(tokens)
    overrides = settings | ({"train.seed": CASES.index(case)} if name == "train" else {})  # a run of its own
    found = forecast(Project(folder, overrides), name)
    assert found
    expected = found.peak
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    run(folder, name, overrides=overrides)
    assert 0.9 < expected / (mx.get_peak_memory() - before) < 1.1, expected


@pytest.mark.slow
def test_disk_is_forecast_within_two_percent_of_what_the_tables_take(tokenised: Callable[[int], Path]) -> None:
    folder = tokenised(128)
    run(folder, "vectors", "ranks", "index")
    settings = folder / "project.toml"
    settings.write_text(settings.read_text().partition("[train]")[0])  # else a run would train the encoder first
    project = Project(folder)
    vectors = projects.planned(project)["vectors"].disk
    assert vectors == pytest.approx(project.current("vectors").manifest()["bytes"], rel=0.02)
    files = sum(path.stat().st_size for path in (project.current("index").folder / "artifacts").rglob("*") if path.is_file())
    assert projects.planned(project)["index"].disk == pytest.approx(files, rel=0.2)  # words compress as they like


def test_what_cannot_fit_is_refused_and_the_named_settings_do_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(text: str = "") -> tuple[list[str], bool]:
        (tmp_path / "project.toml").write_text('[project]\npipeline = "retrieval"\nfamily = "xtr-base-en"\n' + text)
        return projects.report(Project(tmp_path), int(0.45e9))

    assert not any(line.startswith("vectors needs") for line in plan('[vectors]\nprecision = "bfloat16"\n')[0])
    lines, fits = plan()
    (vectors,) = (line for line in lines if line.startswith("vectors needs"))
    assert not fits and '[vectors] precision = "bfloat16" would need 0.' in vectors and vectors.endswith(" GB")
    monkeypatch.setattr("stages.tuner.blockwise.device.memory_budget", lambda limit_gb=None: int(0.45e9))
    with pytest.raises(ValueError, match="vectors needs about"):
        announcement(Project(tmp_path), "vectors", 10, "10 texts")
