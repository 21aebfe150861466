"""The stage scores: positions of previews and real pictures on the style axis."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image, ImageDraw

from pipeline.project.project import Project
from pipeline.project.recipe import rows_sha256
from schemas.text_to_image import CAPTIONS, IMAGES, SAMPLES
from stages.text_to_image.scores import (
    STAGE,
    FeatureGroup,
    ImageEncoder,
    ScoresConfig,
    axis_position,
    real_pictures,
    without_trigger,
)
from tests import harness, projects
from tests.harness import rows_of

pytestmark = pytest.mark.slow
TRIGGER = "zorvex"
COLOURS = {"red": (220, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 220), "yellow": (240, 220, 60)}
ADAPTER = "a" * 64


def disc(path: Path, colour: str, *, striped: bool, size: int = 64) -> Path:
    """On white; the trained style has stripes all over."""
    image = Image.new("RGB", (size, size), "white")
    draw = ImageDraw.Draw(image)
    draw.ellipse((12, 12, size - 12, size - 12), COLOURS[colour])
    for x in range(0, size, 8) if striped else ():
        draw.line((x, 0, size - x, size), "black", 3)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return path


def text(colour: str) -> str:
    return f"a {colour} disc"


class Scene:
    """Training images, previews of the base and of an adapter, and references, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.images = [disc(folder / "images" / f"{n}.png", c, striped=True, size=72) for n, c in enumerate(COLOURS)]
        self.previews: list[dict[str, Any]] = []
        for source, striped in (("", False), (ADAPTER, True)):
            for colour in COLOURS:
                name = f"images/{source[:4] or 'base'}-{colour}.png"
                disc(folder / "samples" / name, colour, striped=striped)
                row = {"adapter_id": source, "step": 40 if source else 0, "prompt": f"{TRIGGER}, {text(colour)}"}
                self.previews.append(row | {"path": name, "caption_id": colour})
        captions = []
        for colour in ("red", "green", "blue"):
            disc(folder / "references" / f"{colour}.png", colour, striped=True, size=80)
            captions.append({"file_name": f"{colour}.png", "text": text(colour)})
        (folder / "references" / "metadata.jsonl").write_text("\n".join(map(json.dumps, captions)))
        self.config = ScoresConfig(references=str(folder / "references"))

    def tables(self) -> dict[str, pa.Table]:
        images = [{"path": p.name, "image_id": hashlib.sha256(p.read_bytes()).hexdigest()} for p in self.images]
        captions = [{"role": "trigger", "text": TRIGGER}, {"role": "caption", "text": "something else"}]
        return {
            "images": rows_of(IMAGES, *images, {"path": "broken.png", "rejected": "truncated"}),
            "captions": rows_of(CAPTIONS, *captions),
            "samples": rows_of(SAMPLES, *self.previews),
        }

    def context(self, config: ScoresConfig | None = None, stored: pa.Table | None = None, fresh: str = "") -> Any:
        made = harness.context(
            STAGE,
            self.folder / ("out" + fresh),
            self.tables(),
            config=config or self.config,
            weights={"samples": self.folder / "samples"},
            stored=stored,
            source=self.folder / "images",
        )
        made.lines = []
        made.report.say = made.lines.append
        return made

    def few(self, *colours: str) -> None:
        self.images = self.images[: len(colours)]
        self.previews = [row for row in self.previews if row["caption_id"] in colours]

    def recipe(self, config: ScoresConfig | None = None) -> str:
        return rows_sha256(STAGE.snapshot(self.context(config)))


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Scene, pa.Table]:
    made = Scene(tmp_path_factory.mktemp("scored"))
    return made, harness.run(STAGE, made.context())


def of(table: pa.Table, kind: str, column: str) -> np.ndarray:
    return np.array([row[column] for row in table.to_pylist() if row["kind"] == kind])


def test_the_base_lies_near_0_and_the_trained_style_near_1(scored):
    _, table = scored
    assert [len(of(table, kind, "path")) for kind in ("base", "adapter", "real")] == [4, 4, 3]
    assert set(of(table, "adapter", "step")) == {40} and set(of(table, "adapter", "adapter_id")) == {ADAPTER}
    assert set(of(table, "real", "prompt")) == {text("red"), text("green"), text("blue")}
    for column in ("style", "real"):
        assert abs(of(table, "base", column).mean()) < 0.2
        assert of(table, "adapter", column).min() > of(table, "base", column).max() + 0.3
        assert of(table, "real", column).mean() > 0.7


def test_a_scored_picture_loads_no_encoder_and_features_are_read_from_the_artifact_of_the_run_before(scored, monkeypatch):
    scene, table = scored
    monkeypatch.setattr(ImageEncoder, "encode_file", None)
    assert harness.run(STAGE, scene.context(stored=table.slice(1))).num_rows == 1, "a preview of the base is one of a group"
    monkeypatch.setattr("stages.text_to_image.scores.ImageEncoder", None)
    assert harness.run(STAGE, scene.context(stored=table)).num_rows == 0


def test_the_trigger_word_is_removed_with_its_comma():
    for prompt in ("cat, a fox", "a fox, cat", "a cat fox"):
        assert without_trigger(prompt, "cat") == "a fox"
    for prompt, plain in (("cat, a fox, red", "a fox, red"), ("cat, a catalog", "a catalog")):
        assert without_trigger(prompt, "cat") == without_trigger(plain, "") == plain


def test_a_picture_has_the_same_score_whatever_else_is_scored_and_damaged_features_are_computed_again(scored):
    scene, table = scored
    context = scene.context(stored=table.slice(0, 5), fresh="again")
    (context.output.artifacts / "features.safetensors").write_bytes(b"cut short")
    assert harness.run(STAGE, context) == table.slice(5)
    assert (context.output.artifacts / "features.safetensors").stat().st_size > 10_000


def test_only_a_preview_that_changed_is_scored_again(scene):
    table = pa.Table.from_batches(scene.context().output.pending.to_batches())
    disc(scene.folder / "samples" / "images" / "aaaa-red.png", "yellow", striped=True)
    pending = scene.context(stored=table).output.pending.to_pylist()
    assert [row["path"] for row in pending] == ["images/aaaa-red.png"]


def test_the_recipe_depends_on_everything_that_a_score_depends_on_and_nothing_else(scene):
    def redrawn(path: str) -> str:
        disc(scene.folder / path, "yellow", striped=True)
        return scene.recipe(moved)

    before = scene.recipe()
    disc(scene.folder / "samples" / "images" / "aaaa-red.png", "yellow", striped=True)
    (scene.folder / "references").rename(scene.folder / "moved")
    moved = replace(scene.config, references=str(scene.folder / "moved"))
    assert scene.recipe(moved) == before  # neither a preview by an adapter nor a folder's name
    seen = {before, scene.recipe(replace(moved, references=""))}
    seen |= {redrawn("samples/images/base-red.png"), redrawn("moved/more.png")}
    scene.images.append(disc(scene.folder / "images" / "more.png", "yellow", striped=True, size=90))
    seen.add(scene.recipe(moved))
    scene.previews[0]["prompt"] = "something else"
    seen.add(scene.recipe(moved))
    assert len(seen) == 6


def test_a_score_without_a_group_to_compare_with_is_null_and_a_line_says_so(scene):
    scene.few("red")  # no preview of another prompt
    context = scene.context(ScoresConfig(references=""))
    table = harness.run(STAGE, context)
    assert table.num_rows == 2
    for column in ("style", "real"):
        assert table[column].null_count == 2
    assert len(context.lines) == 1  # no references


def test_the_only_reference_is_not_measured_against_itself(scene):
    scene.few("red", "green")
    (scene.folder / "references" / "green.png").unlink()
    (scene.folder / "references" / "blue.png").unlink()
    (scene.folder / "references" / "metadata.jsonl").write_text('{"file_name": "red.png", "text": "a red disc"}')
    table = harness.run(STAGE, scene.context())
    assert list(of(table, "real", "real")) == [None]
    assert None not in of(table, "adapter", "real")


def test_a_reference_that_is_trained_on_is_refused(scene):
    (scene.folder / "references" / "copy.png").write_bytes(scene.images[2].read_bytes())
    with pytest.raises(ValueError, match=r"copy\.png is also the training image 2\.png"):
        scene.context()


def test_a_malformed_line_of_metadata_is_named(scene):
    for line, message in (
        ('{"file_name": "none.png", "text": "a"}', "1 row names an image that does not exist: none.png"),
        ('{"file_name": "red.png"}', "line 1"),
        ("red.png: a", "line 1"),
    ):
        (scene.folder / "references" / "metadata.jsonl").write_text(line)
        with pytest.raises(ValueError, match=message):
            scene.context()


def test_a_reference_may_have_its_caption_in_a_text_file_of_its_name(scene):
    for name, colour in (("b", "red"), ("a", "blue"), ("copy-of-a", "blue")):
        disc(scene.folder / "own" / f"{name}.png", colour, striped=True)
    (scene.folder / "own" / "b.txt").write_text(" a red disc\n")
    (scene.folder / "own" / "._a.png").write_bytes(b"of macOS")
    found = real_pictures(scene.context(ScoresConfig(str(scene.folder / "own"))))
    assert [(row["path"], row["prompt"]) for row in found] == [("a.png", ""), ("b.png", "a red disc")]
    assert real_pictures(scene.context(ScoresConfig(str(scene.folder / "nowhere")))) == []


def test_further_pictures_of_two_groups_lie_at_0_and_1_on_average_whatever_their_sizes_and_groups_alike_have_no_axis():
    draw, way = np.random.default_rng(0), np.eye(1, 64)[0]
    for count in (3, 30):
        found = []
        for _ in range(300):
            start_ND, end_ND = draw.normal(0, 0.1, (count, 64)), way + draw.normal(0, 0.1, (count, 64))
            ends = [FeatureGroup(["x"] * count, rows).mean() for rows in (start_ND, end_ND)]
            found.append([axis_position(kind + draw.normal(0, 0.1, 64), *ends) for kind in (0 * way, way)])
        assert np.abs(np.mean(found, axis=0) - (0, 1)).max() < 0.05, count
    one, other = (FeatureGroup(["x"] * 9, 1 + draw.normal(0, 0.2, (9, 64))).mean() for _ in range(2))
    assert axis_position(np.ones(64), one, other) is None


def test_a_transparent_picture_is_encoded_on_the_colour_of_latents(tmp_path, tiny_weights):
    folder = projects.make(tmp_path / "project", tiny_weights, images=1)
    projects.edit(folder, "[train]", '[latents]\nbackground = "#0080ff"\n\n[train]')
    Image.new("RGBA", (64, 64), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    encoder, background = ImageEncoder.load(), Project(folder).config.sections["scores"].background
    expected = encoder.encode(Image.new("RGB", (64, 64), "#0080ff"))
    assert np.array_equal(encoder.encode_file(tmp_path / "clear.png", background), expected)
