"""Paired images on the way from a folder to a picture: recognised, trained with, and drawn from."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline import runner
from pipeline.api import Project
from pipeline.commands.query import answer
from stages.hashing import file_sha256
from tests import projects

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> Path:
    """A project of four images, three of which have a reference; one reference is equal to its image, one has no image."""
    folder = projects.make(tmp_path_factory.mktemp("pairs") / "project", tiny_weights)
    control = folder / "images" / "control"
    control.mkdir()
    shutil.copy(folder / "images" / "picture0.png", control)
    for number in (1, 2):
        projects.draw(control / f"picture{number}.png", seed=50 + number, size=projects.SIZES[number])
    projects.draw(control / "stranger.png", seed=60, size=(96, 96))
    projects.edit(folder, "[train]", "[latents]\nflip = true\n\n[train]\nlr = 0.1")
    projects.edit(folder, 'checkpoints = "all"', 'checkpoints = "last"\nbase = false')
    return folder


def built(folder: Path, *settings: str) -> list[str]:
    console = projects.Silent()
    for name in ("images", "captions", "buckets", "latents", "embeddings", "train", "samples"):
        runner.run(Project(folder, settings), name, console)
    return console.lines


def rows(folder: Path, table: str, *settings: str) -> list[dict]:
    return Project(folder, settings).current(table).rows().to_pylist()


def test_references_are_recognised_trained_with_and_shown_in_the_tables(paired: Path) -> None:
    lines = built(paired)
    assert "paired images: 3 references in control/ for 3 of 4 images" in lines
    assert "no image has the name of the reference control/stranger.png: it is not used" in lines
    images = {row["path"]: row for row in rows(paired, "images")}
    assert images["picture0.png"]["image_id"] == images["control/picture0.png"]["image_id"]
    assert images["control/picture0.png"]["rejected"] is None and images["picture0.png"]["use"] is None
    assert images["control/picture1.png"]["reference_of"] == "picture1.png"
    captioned = {row["image_id"] for row in rows(paired, "captions") if row["role"] == "caption"}
    assert captioned == {images[f"picture{n}.png"]["image_id"] for n in range(4)}
    trained = {row["image_id"]: row["reference_count"] for row in rows(paired, "train")}
    names = {row["image_id"]: path for path, row in images.items() if not row["use"]}
    assert set(trained.items()) <= {(i, int(name != "picture3.png")) for i, name in names.items()}
    assert max(trained.values()) == 1
    unused = answer(Project(paired), "select path, reason from unused").to_pylist()
    assert unused == [{"path": "control/stranger.png", "reason": "a reference, but no image has its name"}]


def test_a_mirrored_crop_is_trained_with_mirrored_references(paired: Path) -> None:
    built(paired)
    from stages.text_to_image.train.data import References

    images, buckets, latents = (rows(paired, name) for name in ("images", "buckets", "latents"))
    found = References(images, buckets, latents)
    encoded = {row["latent_id"]: row for row in latents}
    image = next(row["image_id"] for row in images if row["path"] == "picture1.png")
    for resolution in (64, 96):
        plain, mirrored = (encoded[found.of(image, resolution, flip)[0].latent_id] for flip in (False, True))
        assert (plain["flip"], mirrored["flip"]) == (False, True) and plain["width"] == mirrored["width"]
        own = next(row for row in buckets if (row["image_id"], row["resolution"]) == (image, resolution))
        assert (plain["width"], plain["height"]) == (own["width"], own["height"])  # of equal size, so cut alike


def test_another_reference_is_another_run_and_other_previews(paired: Path, tmp_path: Path) -> None:
    folder = projects.duplicate(paired, tmp_path / "copy")
    built(folder)
    before = Project(folder).current("train").folder
    projects.draw(folder / "images" / "control" / "picture1.png", seed=99, size=projects.SIZES[1])
    built(folder)
    assert Project(folder).current("train").folder != before
    shown = "samples.references=['images/picture0.png']"
    built(folder, shown)
    table = Project(folder, (shown,)).current("samples")
    (row,) = (row for row in table.rows().to_pylist() if row["step"] == 6)
    assert len(row["reference_id"]) == 64
    preview = np.asarray(Image.open(table.folder / "artifacts" / row["path"]))
    plain = Project(folder).adapter().generate("a red thing")
    drawn = Project(folder).adapter().generate("a red thing", references=[folder / "images" / "picture0.png"])
    np.testing.assert_array_equal(np.asarray(drawn), preview)
    assert not np.array_equal(np.asarray(drawn), np.asarray(plain))
    apart = 'samples.prompt_references={"a red thing" = ["images/picture2.png"]}'
    built(folder, shown, apart)
    table = Project(folder, (shown, apart)).current("samples")
    (other,) = (row for row in table.rows().to_pylist() if row["step"] == 6)
    assert other["reference_id"] == file_sha256(folder / "images" / "picture2.png")
    drawn = Project(folder).adapter().generate("a red thing", references=[folder / "images" / "picture2.png"])
    np.testing.assert_array_equal(np.asarray(drawn), np.asarray(Image.open(table.folder / "artifacts" / other["path"])))
    projects.latentmill(folder, "generate", "a red thing", "--reference", str(folder / "images" / "picture0.png"))
    said = projects.latentmill(folder, "query", "select reference_id from generated", "--format", "csv")
    assert row["reference_id"] in said


def test_a_worker_is_sent_the_references_of_all_previews_and_those_of_single_prompts(tmp_path, tiny_weights):
    folder = projects.make(tmp_path / "p", tiny_weights, images=3)
    of_all = "samples.references=['images/picture0.png']"
    of_one = 'samples.prompt_references={"a red thing" = ["images/picture2.png"]}'
    project = Project(folder, (of_all, of_one))
    stage = project.stage("samples")
    assert stage.opens is not None
    opened = {path.resolve() for path in stage.opens(project.open(stage.name))}
    assert opened == {(folder / "images" / name).resolve() for name in ("picture0.png", "picture2.png")}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "images.references=['/tmp']",
            'images.references must name folders below the image folder, .* got "/tmp"',
        ),
        ("samples.references=['none.png']", r"the reference .*none.png cannot be read: No such file or directory"),
        (
            'samples.prompt_references={"a rad thing" = []}',
            'prompt_references must name prompts of .* preview_prompts, got "a rad thing"; did you mean "a red thing"',
        ),
        (
            'samples.prompt_references={"a red thing" = "x.png"}',
            "prompt_references must be a section of names with lists of strings, got",
        ),
    ],
)
def test_a_wrong_reference_is_one_line(paired: Path, setting: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        built(paired, setting)
