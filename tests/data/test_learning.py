"""Training works: in 12 steps, a LoRA of the bundled base moves towards the style of the example."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

from pipeline import runner
from pipeline.commands.text_to_image import evaluate
from pipeline.project.project import Project
from tests import projects

EXAMPLE = projects.ROOT / "data" / "projects" / "example"
PROMPTS, KEPT, STEPS = 4, 8, 12  # of the example, its prompts and its images
SHORT = (
    "buckets.resolutions=[96]",
    "train.batch_size=2",
    "train.schedule.warmup_steps=2",
    "train.validation.share=0.2",
    "samples.width=64",
    "samples.height=64",
    "samples.steps=4",
    "samples.guidance=1.0",
    'scores.references=""',
)


def run(folder: Path, settings: tuple[str, ...], *stage_names: str) -> Project:
    for stage_name in stage_names:
        runner.run(Project(folder, settings), stage_name, projects.Silent())
    return Project(folder, settings)


def held_out(project: Project, *steps: int) -> list[float]:
    rows = [row for row in project.current("train").rows().to_pylist() if row["split"] == "validation"]
    return [float(np.mean([row["loss"] for row in rows if row["step"] == step])) for step in steps]


def test_a_short_run_moves_the_style_and_lowers_the_validation_loss_which_a_learning_rate_near_0_leaves(tmp_path):
    folder = projects.copied(EXAMPLE, tmp_path / "example")
    lines = (folder / "images" / "metadata.jsonl").read_text().splitlines()
    (folder / "images" / "metadata.jsonl").write_text("\n".join(lines[:KEPT]))
    for line in lines[KEPT:]:
        (folder / "images" / json.loads(line)["file_name"]).unlink()
    prompts = tomllib.loads((EXAMPLE / "project.toml").read_text())["captions"]["preview_prompts"][:PROMPTS]
    chosen = (*SHORT, f"captions.preview_prompts={prompts}", f"train.checkpoint_every={STEPS}")
    learning = (*chosen, f"train.steps={STEPS}", f"train.validation.every={STEPS}")
    project = run(folder, learning, "images", "captions", "buckets", "latents", "embeddings", "train", "samples", "scores")
    groups = evaluate.group_rows(project.current("scores").rows().to_pylist())
    base, adapter = (next(rows for name, rows in groups.items() if name.startswith(kind)) for kind in ("base", "step"))
    assert evaluate.auc(evaluate.values(base, "style"), evaluate.values(adapter, "style")) > 0.6
    first, last = held_out(project, 0, STEPS)
    assert last < 0.9 * first
    still = run(folder, (*chosen, "train.lr=1e-12", "train.steps=1", "train.validation.every=1"), "train")
    assert held_out(still, 0, 1) == pytest.approx([first, first])
