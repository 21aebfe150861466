"""project.adapter(): an image that is drawn through the Python API is the preview of the stage samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from pipeline.api import Project
from tests import projects

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> Path:
    """A project with an adapter that changes its previews, and the previews of every checkpoint."""
    folder = projects.make(tmp_path_factory.mktemp("generate") / "project", tiny_weights, images=2)
    projects.edit(folder, "rank = 2", "rank = 2\nlr = 0.1")
    projects.build(folder, "images", "captions", "buckets", "latents", "embeddings", "train", "samples")
    return folder


def preview(project: Project, step: int) -> tuple[dict[str, Any], np.ndarray]:
    """The row and the pixels of the preview of a step; 0 is the base."""
    table = project.current("samples")
    (row,) = [row for row in table.rows().to_pylist() if row["step"] == step]
    with Image.open(table.folder / "artifacts" / row["path"]) as image:
        return row, np.asarray(image)


@pytest.mark.parametrize("step", [None, 2])
def test_an_image_is_the_preview_of_the_same_prompt_seed_and_adapter_to_the_bit(built, step):
    project = Project(built)
    adapter = project.adapter(step=step)
    row, expected = preview(project, step or 6)
    assert adapter.step == row["step"] and adapter.path.is_file()
    assert not np.array_equal(expected, preview(project, 0)[1]), "the adapter changes nothing"
    np.testing.assert_array_equal(np.asarray(adapter.generate(row["prompt"], seed=row["seed"])), expected)


def test_with_strength_0_the_base_alone_draws(built):
    project = Project(built)
    row, expected = preview(project, 0)
    np.testing.assert_array_equal(np.asarray(project.adapter().generate(row["prompt"], strength=0.0)), expected)


def test_arguments_replace_the_settings_of_samples(built):
    adapter = Project(built).adapter()
    plain, wide = adapter.generate("a red thing"), adapter.generate("a red thing", width=96, height=32)
    assert plain.size == (64, 64) and wide.size == (96, 32)
    others = [{"seed": 1}, {"steps": 3}, {"guidance": 1.0}, {"strength": 0.5}]
    images = [np.asarray(adapter.generate("a red thing", **change)) for change in others]
    assert all(not np.array_equal(image, np.asarray(plain)) for image in images)


@pytest.mark.parametrize(("change", "line"), [({"width": 40}, "width must be a multiple of 16"), ({"steps": 0}, "step")])
def test_an_argument_that_cannot_be_drawn_with_is_refused(built, change, line):
    with pytest.raises(ValueError, match=line):
        Project(built).adapter().generate("a red thing", **change)


def test_an_adapter_that_does_not_exist_is_refused_with_those_that_do(built):
    with pytest.raises(ValueError, match="checkpoints are 2, 4, 6"):
        Project(built).adapter(step=3)
    with pytest.raises(ValueError, match="no best adapter"):
        Project(built).adapter("best")


def test_memory_is_released_after_an_image(built):
    adapter = Project(built).adapter()
    mx.clear_cache()
    before = mx.get_active_memory()
    image = adapter.generate("a red thing")
    assert image.size == (64, 64) and mx.get_active_memory() <= before


def pictures(folder: Path, *words: str) -> list[np.ndarray]:
    """The pictures whose paths `latentmill generate` prints."""
    said = projects.latentmill(folder, "generate", *words)
    paths = [line for line in said.splitlines() if line.endswith(".png")]
    found = []
    for path in paths:
        with Image.open(path) as image:
            found.append(np.asarray(image))
    return found


def test_the_command_draws_the_preview_to_the_bit_and_draws_no_picture_twice(built, tmp_path):
    from pipeline.commands.clean import clean
    from pipeline.commands.query import answer

    row, expected = preview(Project(built), 6)
    (tmp_path / "prompts.txt").write_text(f"{row['prompt']}\n\na second thing\n")
    first = pictures(built, "--file", str(tmp_path / "prompts.txt"), "--seed", str(row["seed"]), "--seed", "5")
    assert len(first) == 4
    np.testing.assert_array_equal(first[0], expected)
    rows = answer(Project(built), "select prompt, seed, step, strength, width, seconds from generated order by prompt, seed")
    assert rows.num_rows == 4 and set(rows["step"].to_pylist()) == {6}
    assert answer(Project(built), "select max(seconds) as s from generated").to_pylist()[0]["s"] > 0
    again = pictures(built, row["prompt"], "--seed", str(row["seed"]))
    np.testing.assert_array_equal(again[0], expected)
    list(clean(Project(built), runs=True, dry_run=False))
    assert answer(Project(built), "from generated").num_rows == 4
    base = pictures(built, row["prompt"], "--adapter", "none", "--size", "96x32")
    assert base[0].shape == (32, 96, 3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "generate needs a prompt"),
        (["a", "--size", "big"], "--size must be WIDTHxHEIGHT"),
        (["a", "--size", "65x64"], "width must be a multiple of 16"),
        (["a", "--adapter", "wrst"], "--adapter must be last"),
        (["a", "--adapter", "best"], "no best adapter"),
        (["a", "--strength", "99"], "--strength must be from -10 to 10"),
        (["a", "--step", "5"], "its checkpoints are 2, 4, 6"),
        (["--file", "nothing.txt"], "--file nothing.txt cannot be read"),
    ],
)
def test_a_wrong_wish_is_one_line(built, words, said):
    answered = projects.latentmill(built, "generate", *words, code=2)
    assert said in answered and not answered.count("\n") > 1


def test_export_says_what_to_do_with_the_file_and_names_trigger_and_resolution(built, tmp_path):
    from stages.models.weights import read_file

    said = projects.latentmill(built, "export", str(tmp_path / "a.safetensors"))
    assert "pipe.load_lora_weights(" in said and "models/loras" in said and "--lora-paths" in said
    assert read_file(tmp_path / "a.safetensors")[1]["modelspec.resolution"] == "96x96"
