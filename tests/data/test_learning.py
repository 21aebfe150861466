"""Training works: in 80 steps, a LoRA of the bundled base moves towards the style of the example."""

import tomllib
from pathlib import Path

import numpy as np
import pytest

from pipeline import runner
from pipeline.commands import evaluate
from pipeline.project.project import Project
from tests import projects

pytestmark = pytest.mark.slow
EXAMPLE = projects.ROOT / "data" / "example"
PROMPTS = 8
SHORT = (
    "train.schedule.decay_steps=60",
    "train.keep_states=1",
    "train.validation.share=0.2",
    "samples.steps=12",
)
STAGE_NAMES = ("images", "captions", "buckets", "latents", "embeddings", "train", "samples", "scores")


def train(folder: Path, *settings: str, steps: int = 80) -> tuple[float, float, float]:
    """Train for some steps. Returns the AUC of the adapter's style against the base's, and the first and last validation loss."""
    prompts = tomllib.loads((EXAMPLE / "project.toml").read_text())["captions"]["preview_prompts"][:PROMPTS]
    length = (f"train.steps={steps}", f"train.checkpoint_every={steps // 2}", f"train.validation.every={steps // 2}")
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
    copy = projects.copied(EXAMPLE, tmp_path_factory.mktemp("learning") / "example")
    for name in ("references", "agreement.safetensors"):
        (copy / name).symlink_to(EXAMPLE / name)
    return copy


def test_a_short_run_moves_the_style_and_lowers_the_validation_loss(folder):
    assert has_learned(*train(folder))


def test_a_run_with_a_learning_rate_near_0_does_not_pass_as_learning(folder):
    assert not has_learned(*train(folder, "train.lr=1e-12", steps=20))
