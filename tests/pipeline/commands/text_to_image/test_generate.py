"""project.adapter(): an image that is drawn through the Python API is the preview of the stage samples."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from pipeline.api import Project
from pipeline.commands.clean import clean
from pipeline.commands.query import answer
from pipeline.commands.text_to_image import generate
from pipeline.errors import Stopped
from pipeline.store.table import TableFolder
from schemas.text_to_image import GENERATED
from stages.models.weights import read_file
from stages.text_to_image.samples import drawing
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
    """0 is the base."""
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


def test_arguments_replace_the_settings_of_samples_and_memory_is_released(built):
    adapter = Project(built).adapter()
    mx.clear_cache()
    before = mx.get_active_memory()
    plain, wide = adapter.generate("a red thing"), adapter.generate("a red thing", width=96, height=32)
    assert plain.size == (64, 64) and wide.size == (96, 32)
    others = [{"seed": 1}, {"steps": 3}, {"guidance": 1.0}, {"strength": 0.5}]
    images = [np.asarray(adapter.generate("a red thing", **change)) for change in others]
    assert mx.get_active_memory() <= before
    assert all(not np.array_equal(image, np.asarray(plain)) for image in images)


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
    said = projects.latentmill(built, "generate", "a third thing", "--size", "32x32", "--set", "train.lr=0.2")
    assert f"1 picture of 1 prompt, with step 6 of run {Project(built).current('train').folder.name}" in said
    assert "note: settings, data or weights have changed since: this adapter is from the run" in said
    base = pictures(built, row["prompt"], "--adapter", "none", "--size", "96x32")
    assert base[0].shape == (32, 96, 3)


def test_the_twin_draws_the_same_picture_as_preview_command_and_method_with_its_own_steps_and_not_that_of_the_base(built):
    twin = {"samples.family": "tiny-distilled", "samples.steps": 2, "samples.checkpoints": "last"}
    project, (row, base) = Project(built, twin), preview(Project(built), 6)
    others = [name for name in project.stage_names if name not in ("samples", "scores")]
    assert [project.recipe(name) for name in others] == [Project(built).recipe(name) for name in others]
    projects.latentmill(built, "run", "samples", *(word for key, value in twin.items() for word in ("--set", f"{key}={value}")))
    _, expected = preview(project, 6)
    with Image.open(project.current("samples").folder / "artifacts" / row["path"]) as image:
        assert image.info["family"] == "tiny-distilled"
    drawn = pictures(built, row["prompt"], "--seed", str(row["seed"]), "--family", "tiny-distilled")
    np.testing.assert_array_equal(drawn[0], expected)
    method = Project(built).adapter().generate(row["prompt"], seed=row["seed"], family="tiny-distilled")
    np.testing.assert_array_equal(np.asarray(method), expected)
    assert not np.array_equal(base, expected)
    assert not np.array_equal(pictures(built, row["prompt"], "--adapter", "none", "--family", "tiny-distilled")[0], expected)
    shown = answer(Project(built), "select distinct family, steps, guidance from generated where family = 'tiny-distilled'")
    assert shown.to_pylist() == [{"family": "tiny-distilled", "steps": 2, "guidance": 1.0}]
    both = answer(Project(built), "select distinct family from all_samples where step = 6 order by 1")["family"].to_pylist()
    assert both == ["tiny", "tiny-distilled"]


def test_strengths_by_block_draw_as_the_file_that_is_exported_with_what_to_do_or_merged_with_them(built, tmp_path):
    row, expected = preview(Project(built), 6)
    words, weighed = [row["prompt"], "--seed", str(row["seed"])], ["--strength-for", "single_transformer_blocks.*=0"]
    drawn = pictures(built, *words, *weighed)[0]
    assert not np.array_equal(drawn, expected)
    np.testing.assert_array_equal(
        pictures(built, *words, "--strength-for", "*=0.5")[0], pictures(built, *words, "--strength", "0.5")[0]
    )
    np.testing.assert_array_equal(pictures(built, *words, "--strength-for", "*=0")[0], preview(Project(built), 0)[1])
    file = tmp_path / "weighed.safetensors"
    said = projects.latentmill(built, "export", str(file), "--dtype", "float32", *weighed)
    assert "pipe.load_lora_weights(" in said and "ComfyUI does not know tiny" in said and "--lora-paths" in said
    assert read_file(file)[1]["modelspec.resolution"] == "96x96"
    assert str(file) in projects.latentmill(built, "export", str(file / "cats.safetensors"), code=2)
    np.testing.assert_array_equal(pictures(built, *words, "--adapter", str(file))[0], drawn)
    told = projects.latentmill(
        built, "merge", "last", "last", "--strength", "0.5", "--strength", "0.5", "--dtype", "float32", *weighed
    )
    merged = told.splitlines()[-1].removeprefix("wrote ")
    assert np.abs(pictures(built, *words, "--adapter", merged)[0].astype(int) - drawn).max() <= 2
    code, shown, _ = projects.said("adapter", str(file))
    assert code == 0
    assert "LoRA in the names of diffusers, float32" in shown and "fits: tiny, tiny-distilled" in shown
    assert "transformer_blocks.0 " in shown and "single_transformer_blocks.0" not in shown and "█" in shown
    assert "strength_for" in shown and "rank 2" in shown


def test_an_average_of_all_checkpoints_is_a_file_that_draws(built, tmp_path):
    told = projects.latentmill(built, "average", "--width", "0.25", "--out", str(tmp_path / "mean.safetensors"))
    assert "steps and their weights: 2 " in told and (tmp_path / "mean.safetensors").is_file()
    row, last = preview(Project(built), 6)
    drawn = pictures(built, row["prompt"], "--seed", str(row["seed"]), "--adapter", str(tmp_path / "mean.safetensors"))[0]
    assert not np.array_equal(drawn, last) and not np.array_equal(drawn, preview(Project(built), 0)[1])
    assert "average needs two checkpoints or more, found 1" in projects.latentmill(built, "average", "--step", "3", code=2)


def wish(seeds: int = 3, **given: Any) -> generate.Wish:
    return generate.Wish(("a thing that nobody drew",), tuple(range(seeds)), given=given)


class Interrupting(projects.Silent):
    """Interrupts the process after so many denoising steps, as Ctrl-C does."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after, self.steps = after, []

    def progress(self, done: int, total: int, unit: str) -> None:
        self.steps.append((done, total))
        if done == self.after:
            signal.raise_signal(signal.SIGINT)


def test_a_generate_that_is_interrupted_or_killed_draws_no_picture_twice_and_keeps_what_it_says(built, monkeypatch):
    steps, before = Project(built).config.sections["samples"].steps, len(rows_of(built))
    console = Interrupting(after=steps + 1)
    with pytest.raises(Stopped, match=r"generate: stopped; 0 new pictures are kept, and the latents .* 3 are still to do"):
        list(generate.generate(Project(built), wish(width=32), console))
    assert console.steps[-1] == (steps + 1, 3 * steps)
    save, again, last = drawing.save_png, Interrupting(after=-1), Interrupting(after=-1)

    def dies(path: Path, image: Image.Image, metadata: dict[str, Any]) -> None:
        if TableFolder(path.parents[3], GENERATED).committed().num_rows > before:
            raise KeyboardInterrupt
        save(path, image, metadata)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # at the second picture: the first is committed
        patch.setattr(drawing, "save_png", dies)
        list(generate.generate(Project(built), wish(width=32), again))
    assert again.steps[-1] == (2 * steps, 2 * steps), "the first picture is not drawn again"
    paths = list(generate.generate(Project(built), wish(width=32), last))
    assert not last.steps, "all latents were there"
    assert len(paths) == 3 and all(path.is_file() for path in paths)
    assert len(rows_of(built)) == before + 3 and not list(paths[0].parents[1].glob("latents/*"))


def test_pictures_that_need_more_memory_than_there_is_are_refused_before_anything_is_loaded(built, monkeypatch):
    monkeypatch.setattr("stages.tuner.blockwise.device.memory_budget", lambda *given: 1000)
    monkeypatch.setattr("stages.text_to_image.sampler.load_transformer", None)
    with pytest.raises(ValueError, match=r"generate needs about .* GB of memory, more than"):
        list(generate.generate(Project(built), wish(width=48), projects.Silent()))
    with pytest.raises(ValueError, match=r"generate needs about .* GB of memory, more than"):
        Project(built).adapter().generate("a thing")


def test_the_bits_of_the_text_encoder_decide_the_id_of_a_picture_and_16_keep_that_of_earlier_versions(built):
    with pytest.raises(ValueError, match=r"samples.weights must be empty without another samples.family"):
        Project(built, {"samples.weights": "somewhere"}).recipe("samples")
    sixteen, eight = (generate._weights(Project(built, {"embeddings.bits": bits})) for bits in (16, 8))
    assert "text_bits" not in sixteen and sixteen != eight


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return answer(Project(folder), "from generated where family = 'tiny'").to_pylist()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "generate needs a prompt"),
        (["a", "--size", "big"], "--size must be WIDTHxHEIGHT"),
        (["a", "--adapter", "best"], "no best adapter"),
        (["a", "--strength", "99"], "--strength must be from -10 to 10"),
        (["a", "--step", "5"], "its checkpoints are 2, 4, 6"),
        (["a", "--family", "klein-4b"], "samples.family must be tiny or tiny-distilled, which the adapter fits, got 'klein-4b'"),
    ],
)
def test_a_wrong_wish_is_one_line(built, words, said):
    answered = projects.latentmill(built, "generate", *words, code=2)
    assert said in answered and not answered.count("\n") > 1
