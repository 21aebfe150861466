"""The stage samples: which previews are drawn, how they are stored and shown, and what a stop leaves behind."""

from __future__ import annotations

import hashlib
import shutil
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from schemas.text_to_image import CAPTIONS, TRAIN
from stages.run import Run
from stages.text_to_image.samples.config import SamplesConfig
from stages.text_to_image.samples.grid import draw_grid
from stages.text_to_image.samples.stage import STAGE
from stages.tuner import checkpoint
from tests import harness
from tests.stages.text_to_image.samples.previews import CONFIG, PROMPTS, SIZE, STEPS, TINY, context, pixels, tables


@pytest.fixture(scope="module")
def whole(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run[Any], pa.Table]:
    """A run without a stop, and its rows."""
    run = context(root, tmp_path_factory.mktemp("whole"))
    run.output.provenance = {"recipe": "abc"}
    return run, harness.run(STAGE, run)


def test_every_prompt_seed_and_source_is_a_row_with_a_picture_that_says_how_it_was_drawn(root: Path, whole) -> None:
    run, rows = whole[0], whole[1].to_pylist()
    assert [(r["step"], r["prompt"], r["seed"]) for r in rows] == [
        (s, p, n) for s in (0, 10, 20) for p in PROMPTS for n in (0, 5)
    ]
    for row in rows:
        saved = root / "train" / "checkpoints" / f"step-{row['step']:06d}" / "adapter.safetensors"
        assert row["adapter_id"] == (hashlib.sha256(saved.read_bytes()).hexdigest() if row["step"] else "")
        with Image.open(run.output.artifacts / row["path"]) as image:
            assert image.size == (SIZE, SIZE)
            assert (image.info["prompt"], image.info["step"], image.info["recipe"]) == (row["prompt"], str(row["step"]), "abc")


@pytest.mark.parametrize(
    ("change", "last_step", "steps"),
    [
        ({"checkpoints": "last"}, 20, [0, 20]),
        ({"checkpoints": "last"}, 10, [0, 10]),  # a run made shorter: no later checkpoint
        ({"checkpoints": "all"}, 10, [0, 10]),
        ({"checkpoints": "all", "base": False}, 20, [10, 20]),
        ({"checkpoints": (20,)}, 10, [0, 20]),  # unless it is named
        ({"checkpoints": (20, 10, 20), "base": False, "first_prompts": 1}, 20, [10, 20]),
        ({"checkpoints": (), "first_prompts": 100}, 20, [0]),
    ],
)
def test_the_chosen_checkpoints_and_the_first_prompts_are_wanted_in_order(
    root: Path, tmp_path: Path, change: dict[str, Any], last_step: int, steps: list[int]
) -> None:
    wanted = STAGE.wants(context(root, tmp_path, replace(CONFIG, **change), last_step=last_step)).to_pylist()
    prompts = PROMPTS[: change.get("first_prompts", 2)]
    assert [(row["step"], row["prompt"]) for row in wanted[::2]] == [(step, prompt) for step in steps for prompt in prompts]
    assert len(wanted) == 2 * len(steps) * len(prompts)


def test_a_step_without_a_checkpoint_is_refused_and_the_steps_with_one_are_named(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be steps with a checkpoint \(10, 20\), got 15"):
        context(root, tmp_path, replace(CONFIG, checkpoints=(10, 15)))


def files(run: Run[Any]) -> set[str]:
    return {str(path.relative_to(run.output.artifacts)) for path in run.output.artifacts.rglob("*") if path.is_file()}


def test_a_stop_takes_effect_after_the_current_denoising_step_and_nothing_is_drawn_twice(root: Path, tmp_path: Path) -> None:
    config, bar = replace(CONFIG, checkpoints=()), []
    run = context(root, tmp_path, config, stop=lambda: len(bar) > STEPS)
    run.report.progress = lambda done, total, unit: bar.append((done, total))
    assert harness.run(STAGE, run).num_rows == 0
    assert bar[-1] == (STEPS + 1, 4 * STEPS)
    assert len([name for name in files(run) if name.startswith("latents/")]) == 1
    again = context(root, tmp_path, config)
    again.report.progress = run.report.progress
    assert harness.run(STAGE, again).num_rows == 4
    assert bar[-1] == (3 * STEPS, 3 * STEPS)


def test_a_stop_between_two_pictures_leaves_the_rest_to_the_next_run_and_a_crash_after_it_leaves_the_grid(
    root: Path, whole, tmp_path: Path
) -> None:
    config, seen, grid = replace(CONFIG, checkpoints=()), tmp_path / "artifacts" / "images", {"path": "grid.png"}
    expected = whole[1].to_pylist()[:4]
    stored = harness.run(STAGE, context(root, tmp_path, config, stop=lambda: any(seen.glob("*.png"))))
    assert stored["path"].to_pylist() == [expected[0]["path"]]
    autoencoder = {"autoencoder": root / "weights" / "vae", "train": root / "train"}  # and no transformer
    second = context(root, tmp_path, config, stored=stored, weights=autoencoder)
    grey = pixels(second, grid)
    rest = harness.collect(STAGE, STAGE.run(second))  # and no `finish`: the process was killed
    assert rest["path"].to_pylist() == [row["path"] for row in expected[1:]]
    assert all(row["seconds"] > 0 for row in rest.to_pylist())
    assert all(np.array_equal(pixels(second, row), pixels(whole[0], row)) for row in expected)
    last = context(root, tmp_path, config, stored=pa.concat_tables([stored, rest]))
    harness.run(STAGE, last)
    shown = pixels(last, grid)
    assert files(last) == {"grid.png", *(row["path"] for row in expected)}
    (tmp_path / "artifacts" / "grid.png").unlink()
    harness.run(STAGE, last)
    assert np.array_equal(pixels(last, grid), shown) and not np.array_equal(shown, grey)


def test_the_grid_has_a_row_per_prompt_and_seed_and_a_column_per_source(whole) -> None:
    run, rows = whole[0], whole[1].to_pylist()
    with Image.open(run.output.artifacts / "grid.png") as image:
        page = np.asarray(image.convert("RGB")).astype(np.float32)
    at = iter([(220 + c * 40, 36 + r * 40) for c in range(3) for r in range(4)])
    for row in rows:  # source by source, so column by column
        left, top = next(at)
        np.testing.assert_array_equal(page[top : top + SIZE, left : left + SIZE], pixels(run, row))
    assert page.shape == (36 + 4 * 40, 220 + 3 * 40, 3)


def test_the_grid_writes_letters_with_accents_also_those_of_two_characters() -> None:
    def drawn(text: str) -> bytes:
        return draw_grid([[None]], ["base"], [text], (64, 64)).tobytes()

    assert drawn(unicodedata.normalize("NFD", "Café größe")) == drawn("Café größe")
    assert len({drawn(letter) for letter in ("\uffff", *"éößŁčЖω")}) == 8  # none is the box of a letter that is missing


def test_the_grid_comes_back_when_it_is_lost_and_follows_the_choice(root: Path, whole, tmp_path: Path) -> None:
    stored, file = whole[1], tmp_path / "artifacts" / "grid.png"
    shutil.copytree(whole[0].output.artifacts, tmp_path / "artifacts")
    shown, before = pixels(whole[0], {"path": "grid.png"}), file.stat().st_mtime_ns
    harness.run(STAGE, context(root, tmp_path, stored=stored))
    assert file.stat().st_mtime_ns == before, "it shows what is wanted: leave it"
    file.unlink()
    harness.run(STAGE, context(root, tmp_path, stored=stored))
    assert np.array_equal(pixels(whole[0], {"path": file}), shown)
    fewer = context(root, tmp_path, replace(CONFIG, base=False, grid=1), stored=stored)
    assert STAGE.wants(fewer).num_rows == 2 * 2 * 2, "prompts that the grid does not show too"
    harness.run(STAGE, fewer)
    with Image.open(file) as image:
        assert image.size == (220 + 2 * 40, 36 + 2 * 40)


def test_an_adapter_that_was_damaged_is_refused(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "train", tmp_path / "train")
    file = tmp_path / "train" / "checkpoints" / "step-000020" / "adapter.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    weights = {"transformer": root / "weights" / "transformer", "train": tmp_path / "train"}
    run = context(root, tmp_path, replace(CONFIG, checkpoints="last", base=False), weights=weights)
    with pytest.raises(ValueError, match=r"adapter\.safetensors is damaged; choose another checkpoint"):
        harness.run(STAGE, run)


def test_an_adapter_that_draws_no_finite_values_leaves_no_picture(root: Path, tmp_path: Path) -> None:
    (saved,) = [saved for saved in checkpoint.find_checkpoints(root / "train") if saved.step == 10]
    ruined = {name: 1e30 * value for name, value in saved.arrays(checkpoint.ADAPTER).items()}
    about = {"rank": "2", "alpha": "4.0"}
    checkpoint.save(harness.writer_into(tmp_path / "train"), 30, ruined, {}, TRAIN.batch.empty_table(), about, {})
    weights = {"transformer": root / "weights" / "transformer", "train": tmp_path / "train"}
    run = context(root, tmp_path, replace(CONFIG, base=False), last_step=30, weights=weights)
    with pytest.raises(ValueError, match=r"^samples: step 30 draws values that are not finite; choose .*, or lower \[train\] lr"):
        harness.run(STAGE, run)
    assert not files(run)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"checkpoints": "latest"}, 'checkpoints must be "last", "all" or a list of steps .*, got "latest"'),
        ({"width": 1000}, "width must be a multiple of 16, such as 992, got 1000"),
        ({"seeds": (1, 1)}, r"seeds must be different .*, got \[1, 1\]"),
        ({"seeds": ()}, r"seeds must be .*, got \[\]"),
    ],
)
def test_settings_that_allow_no_preview_are_refused(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        SamplesConfig(**values)


def test_a_project_without_preview_prompts_says_why_there_are_no_previews(root: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    given = {**tables(), "captions": CAPTIONS.batch.empty_table()}
    run = harness.context(STAGE, tmp_path, given, config=CONFIG, family=TINY, weights={"train": root / "train"})
    run.report.say = lines.append
    assert harness.run(STAGE, run).num_rows == 0
    assert len(lines) == 1 and "preview_prompts" in lines[0]
    assert not files(run)
