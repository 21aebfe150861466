"""A project whose adapter is trained over another one: previews, generate, export, replay, and distilled families."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.api import Project
from pipeline.project.outlook import require_trainable
from tests import projects
from tests.pipeline.commands.text_to_image.test_generate import pictures, preview

pytestmark = pytest.mark.slow
OVER = '\n[[train.beneath]]\nfile = "style.safetensors"\nstrength = 10\ndrawn = {}\n'


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> Path:
    """A project over an adapter that is drawn; "style.safetensors" was trained in the same project before."""
    folder = projects.make(tmp_path_factory.mktemp("beneath") / "project", tiny_weights, images=2)
    projects.edit(folder, "rank = 2", "rank = 2\nlr = 0.1")
    projects.edit(folder, "steps = 6", "steps = 2")
    projects.build(folder, "images", "captions", "buckets", "latents", "embeddings", "train")
    projects.latentmill(folder, "export", str(folder / "style.safetensors"), "--dtype", "float32")
    before = Project(folder).recipe("train")
    with (folder / "project.toml").open("a") as file:
        file.write(OVER.format("true"))
    assert Project(folder).recipe("train") != before
    projects.build(folder, "train", "samples")
    return folder


def shown(project: Project, step: int) -> np.ndarray:
    return preview(project, step)[1].astype(int)


def test_pictures_have_what_lies_beneath_and_the_exported_files_draw_the_same_with_or_without_it(built, tmp_path):
    project = Project(built)
    assert "content" in project.recipe("samples") and "content" not in Project(built, {"samples.beneath": []}).recipe("samples")
    row, expected = preview(project, 2)
    words = [row["prompt"], "--seed", str(row["seed"])]
    np.testing.assert_array_equal(pictures(built, *words)[0], expected)
    assert shown(project, 0).std() and not np.array_equal(shown(project, 0), expected)
    alone, joined = tmp_path / "alone.safetensors", tmp_path / "joined.safetensors"
    projects.latentmill(built, "export", str(alone), "--dtype", "float32")
    projects.latentmill(built, "export", str(joined), "--dtype", "float32", "--beneath")
    bare = ["--set", "samples.beneath=[]"]
    # Sums in another order: at most a few steps of 8 bits.
    assert np.abs(pictures(built, *words, "--adapter", str(joined), *bare)[0].astype(int) - expected).max() <= 2
    two = ["--adapter", str(alone), "--adapter", str(built / "style.safetensors"), "--strength", "1", "--strength", "10"]
    both = pictures(built, *words, *two, *bare)[0]
    assert np.abs(both.astype(int) - expected).max() <= 2
    assert np.abs(pictures(built, *words, "--adapter", str(alone), *bare)[0].astype(int) - expected).max() > 2


def test_an_assistant_is_trained_over_and_not_drawn(built):
    project, assisted = (
        Project(built),
        Project(built, {"train.beneath": [{"file": "style.safetensors", "strength": 10.0, "drawn": False}]}),
    )
    assert assisted.recipe("train")["snapshot"] == project.recipe("train")["snapshot"]
    row, expected = preview(project, 2)
    drawn = assisted.adapter().generate(row["prompt"], seed=row["seed"])
    bare = Project(built, {"samples.beneath": []}).adapter().generate(row["prompt"], seed=row["seed"])
    assert np.array_equal(np.asarray(drawn), np.asarray(bare)) and not np.array_equal(np.asarray(drawn), expected)


def test_replay_trains_over_the_same_adapter(built):
    said = projects.latentmill(built, "replay", "2")
    assert "differs" not in said and "loss" in said


def test_a_distilled_family_is_trained_on_with_an_assistant_beneath_or_if_it_is_forced(built, tmp_path):
    (tmp_path / "project.toml").write_text('[project]\nfamily = "tiny-distilled"\n')

    def allowed(more: dict[str, object]) -> None:
        require_trainable(Project(tmp_path, more), "train")

    entry = {"file": "assistant.safetensors"}
    allowed({"train.allow_distilled": True})
    allowed({"train.beneath": [{**entry, "drawn": False}]})
    for more in ({}, {"train.beneath": [entry]}):
        with pytest.raises(ValueError, match=r"tiny-distilled is distilled: .* family = \"tiny\".* Or lay an assistant beneath"):
            allowed(more)
