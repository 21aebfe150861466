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
from stages.text_to_image.train.data import References
from tests import projects

pytestmark = pytest.mark.slow
OF_ALL = "samples.references=['images/picture0.png']"
OF_ONE = 'samples.prompt_references={"a red thing" = ["images/picture2.png"]}'
STAGES = ("images", "captions", "buckets", "latents", "embeddings", "train", "samples")


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
    projects.edit(folder, "width = 64\nheight = 64\nsteps = 2", "width = 32\nheight = 32\nsteps = 1")
    return folder


def built(folder: Path, *settings: str) -> list[str]:
    console = projects.Silent()
    for name in STAGES:
        runner.run(Project(folder, settings), name, console)
    return console.lines


def rows(folder: Path, table: str, *settings: str) -> list[dict]:
    return Project(folder, settings).current(table).rows().to_pylist()


def test_references_are_recognised_trained_with_mirrored_as_their_crop_is_and_shown_in_the_tables(paired: Path) -> None:
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
    buckets, latents = rows(paired, "buckets"), rows(paired, "latents")
    found = References(list(images.values()), buckets, latents)
    encoded = {row["latent_id"]: row for row in latents}
    image = images["picture1.png"]["image_id"]
    for resolution in (64, 96):
        plain, mirrored = (encoded[found.of(image, resolution, flip)[0].latent_id] for flip in (False, True))
        assert (plain["flip"], mirrored["flip"]) == (False, True) and plain["width"] == mirrored["width"]
        own = next(row for row in buckets if (row["image_id"], row["resolution"]) == (image, resolution))
        assert (plain["width"], plain["height"]) == (own["width"], own["height"])  # of equal size, so cut alike


def test_another_reference_is_another_run_and_other_previews_and_a_prompt_may_have_its_own(paired: Path, tmp_path: Path) -> None:
    folder = projects.duplicate(paired, tmp_path / "copy")
    built(folder)
    before = Project(folder).current("train").folder
    projects.draw(folder / "images" / "control" / "picture1.png", seed=99, size=projects.SIZES[1])
    built(folder)
    assert Project(folder).current("train").folder != before
    plain = np.asarray(Project(folder).adapter().generate("a red thing"))
    settings, shown = [], []
    for name, setting in (("picture0.png", OF_ALL), ("picture2.png", OF_ONE)):
        settings.append(setting)
        built(folder, *settings)
        table = Project(folder, settings).current("samples")
        (row,) = (row for row in table.rows().to_pylist() if row["step"] == 6)
        assert row["reference_id"] == file_sha256(folder / "images" / name)
        preview = np.asarray(Image.open(table.folder / "artifacts" / row["path"]))
        drawn = Project(folder).adapter().generate("a red thing", references=[folder / "images" / name])
        np.testing.assert_array_equal(np.asarray(drawn), preview)
        assert not any(np.array_equal(preview, other) for other in (plain, *shown))
        shown.append(preview)
    projects.latentmill(folder, "generate", "a red thing", "--reference", str(folder / "images" / "picture2.png"))
    said = projects.latentmill(folder, "query", "select reference_id from generated", "--format", "csv")
    assert row["reference_id"] in said


def test_a_worker_is_sent_the_references_of_all_previews_and_those_of_single_prompts(tmp_path, tiny_weights):
    folder = projects.make(tmp_path / "p", tiny_weights, images=3)
    project = Project(folder, (OF_ALL, OF_ONE))
    stage = project.stage("samples")
    assert stage.opens is not None
    opened = {path.resolve() for path in stage.opens(project.open(stage.name))}
    assert opened == {(folder / "images" / name).resolve() for name in ("picture0.png", "picture2.png")}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("images.references=['/tmp']", 'must name folders below the image folder, .* got "/tmp"'),
        ("samples.references=['none.png']", r"the reference .*none.png cannot be read: No such file or directory"),
        (
            OF_ONE.replace("red", "rad"),
            'prompt_references must name prompts of .*, got "a rad thing"; did you mean "a red thing"',
        ),
        (OF_ONE.replace("[", "").replace("]", ""), "prompt_references must be a section of names with lists of strings, got"),
    ],
)
def test_a_wrong_reference_is_one_line(paired: Path, setting: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        built(paired, setting)
