"""Training works: a LoRA of the bundled base takes on the look of the example, in fewer steps than the example's own."""

import tomllib
from pathlib import Path

import numpy as np
import pytest

from pipeline import runner
from pipeline.commands import evaluate
from pipeline.project.project import Project
from tests import projects

EXAMPLE = projects.ROOT / "data" / "example"
PROMPTS = 8
SHORT = (
    "train.steps=160",
    "train.schedule.decay_steps=140",
    "train.checkpoint_every=80",
    "train.keep_states=1",
    "train.validation.share=0.2",
    "train.validation.every=80",
    "samples.steps=12",
)
STAGE_NAMES = ("images", "captions", "buckets", "latents", "embeddings", "train", "samples", "scores")


def trained(folder: Path, *settings: str) -> tuple[float, float, float]:
    """(AUC of the adapter's style against the base's, held-out loss at first, and at last) of a short run."""
    prompts = tomllib.loads((EXAMPLE / "project.toml").read_text())["captions"]["preview_prompts"][:PROMPTS]
    chosen = (*SHORT, f"captions.preview_prompts={prompts}", *settings)
    for stage_name in STAGE_NAMES:
        runner.run(Project(folder, chosen), stage_name, projects.Silent())
    project = Project(folder, chosen)
    groups = evaluate.grouped(project.current("scores").rows().to_pylist())
    base, adapter = (next(rows for name, rows in groups.items() if name.startswith(kind)) for kind in ("base", "step"))
    style = evaluate.auc(evaluate.values(base, "style"), evaluate.values(adapter, "style"))
    held = [row for row in project.current("train").rows().to_pylist() if row["split"] == "validation"]
    first, last = (np.mean([row["loss"] for row in held if row["step"] == step]) for step in (0, 160))
    return style, float(first), float(last)


def learnt(style: float, first: float, last: float) -> bool:
    """The pictures lie beyond the base's on the way to the look that was trained, and what was held out is predicted better."""
    return style > 0.6 and last < 0.9 * first


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = projects.copied(EXAMPLE, tmp_path_factory.mktemp("learning") / "example")
    for name in ("references", "agreement.safetensors"):
        (copy / name).symlink_to(EXAMPLE / name)
    return copy


def test_a_short_run_moves_the_style_and_lowers_the_loss_of_what_was_held_out(folder):
    assert learnt(*trained(folder))


def test_a_run_with_a_learning_rate_of_nearly_nothing_does_not_pass_for_one_that_learnt(folder):
    assert not learnt(*trained(folder, "train.lr=1e-12"))
