"""Training works: in 16 steps, a LoRA of the bundled base moves towards the style of the example."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

from pipeline import runner
from pipeline.commands.text_to_image import evaluate
from pipeline.project.project import Project
from tests import projects

pytestmark = pytest.mark.slow
EXAMPLE = projects.ROOT / "data" / "projects" / "example"
PROMPTS = 4
KEPT = 12  # images of the example
SHORT = (
    "train.batch_size=2",
    "train.schedule.warmup_steps=2",
    "train.validation.share=0.2",
    "samples.width=64",
    "samples.height=64",
    "samples.steps=4",
    "samples.guidance=1.0",
    'scores.references=""',
)
STAGE_NAMES = ("images", "captions", "buckets", "latents", "embeddings", "train", "samples", "scores")


def train(folder: Path, *settings: str, steps: int = 16) -> tuple[float, float, float]:
    """(AUC of the adapter's style against the base's, first and last validation loss)."""
    prompts = tomllib.loads((EXAMPLE / "project.toml").read_text())["captions"]["preview_prompts"][:PROMPTS]
    length = tuple(f"train.{name}={steps}" for name in ("steps", "checkpoint_every", "validation.every"))
    chosen = (*SHORT, *length, f"captions.preview_prompts={prompts}", *settings)
    for stage_name in STAGE_NAMES:
        runner.run(Project(folder, chosen), stage_name, projects.Silent())
    project = Project(folder, chosen)
    groups = evaluate.group_rows(project.current("scores").rows().to_pylist())
    base, adapter = (next(rows for name, rows in groups.items() if name.startswith(kind)) for kind in ("base", "step"))
    style = evaluate.auc(evaluate.values(base, "style"), evaluate.values(adapter, "style"))
    held = [row for row in project.current("train").rows().to_pylist() if row["split"] == "validation"]
    first, last = (np.mean([row["loss"] for row in held if row["step"] == step]) for step in (0, steps))
    return style, float(first), float(last)


def has_learned(style: float, first: float, last: float) -> bool:
    """Whether the previews are nearer to the training images than the base's, and the validation loss fell."""
    return style > 0.6 and last < 0.9 * first


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = projects.copied(EXAMPLE, tmp_path_factory.mktemp("learning") / "example")
    lines = (folder / "images" / "metadata.jsonl").read_text().splitlines()
    (folder / "images" / "metadata.jsonl").write_text("\n".join(lines[:KEPT]))
    for line in lines[KEPT:]:
        (folder / "images" / json.loads(line)["file_name"]).unlink()
    return folder


def test_a_short_run_moves_the_style_and_lowers_the_validation_loss(folder):
    assert has_learned(*train(folder))


def test_a_run_with_a_learning_rate_near_0_does_not_pass_as_learning(folder):
    style, first, last = train(folder, "train.lr=1e-12", "samples.first_prompts=2", steps=2)
    assert not has_learned(style, 1.0, 0.5) and not has_learned(1.0, first, last), "neither of the two measures passes"
