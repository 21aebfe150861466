"""How many rows of each table a change to a project makes the program compute again, as the plan foretells. All others are
reused.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from pipeline.project.project import Project
from stages.text_to_image.families import family
from tests import projects

pytestmark = pytest.mark.slow
FORETOLD = ("images", "captions", "buckets", "latents", "embeddings", "train")
BEFORE = ("images", "captions", "checks", "descriptions", "buckets", "latents", "embeddings", "drawings")  # training
STEPS = 2
RESOLUTIONS = 2
TRAINED = {"train": STEPS, "samples": 2, "scores": 2}  # a preview of each of two checkpoints; the base has another
SMALL = (
    ("\nsteps = 6\nrank = 2\ncheckpoint_every = 2\n", f"\nsteps = {STEPS}\nrank = 2\ncheckpoint_every = 1\n"),
    ("width = 64\nheight = 64\nsteps = 2", "width = 32\nheight = 32\nsteps = 1"),
)


@pytest.fixture(scope="module")
def built(tmp_path_factory, tiny_weights) -> Path:
    folder = projects.make(tmp_path_factory.mktemp("built") / "project", tiny_weights)
    for old, new in SMALL:
        projects.edit(folder, old, new)
    projects.build(folder)
    return folder


@pytest.fixture
def project(built, tmp_path) -> Path:
    return projects.duplicate(built, tmp_path / "project")


def rows(folder: Path, **changed: int) -> None:
    """Stages write exactly these numbers of rows, by table, as the plan foretells: all stages if previews are drawn, and else
    those before training.
    """
    plan = projects.planned(Project(folder))
    assert {name: plan[name].missing for name in FORETOLD} == {name: changed.get(name, 0) for name in FORETOLD}
    found = projects.written(projects.build(folder, *(() if "samples" in changed else BEFORE)))
    # One new image may change the warnings of others.
    assert found == {name: changed.get(name, 0) for name in found} | {"checks": found["checks"]}


def setting(old: str, new: str) -> Callable[[Path], None]:
    return lambda project: projects.edit(project, old, new)


def rename(project: Path) -> None:
    for suffix in (".png", ".txt"):
        (project / "images" / f"picture1{suffix}").rename(project / "images" / f"renamed{suffix}")


def remove(project: Path) -> None:
    for suffix in (".png", ".txt"):
        (project / "images" / f"picture1{suffix}").unlink()


def come_back(project: Path) -> None:
    picture = project / "images" / "picture1.png"
    picture.rename(project / "aside.png")
    projects.build(project, *BEFORE)
    (project / "aside.png").rename(picture)


def class_word(project: Path) -> None:
    projects.edit(project, "[captions]", '[captions]\ntrigger = "picture"')
    rows(project, captions=4 + 3, embeddings=1)
    projects.edit(project, 'trigger = "picture"', 'trigger = "picture"\nclass_word = "thing"')


def mask(project: Path) -> None:
    projects.edit(project, "[train]", '[latents]\nmask = "file"\n\n[train]')
    Image.new("L", (160, 120), 255).save(project / "images" / "picture0.mask.png")
    rows(project, latents=RESOLUTIONS, train=STEPS)
    Image.new("L", (160, 120), 128).save(project / "images" / "picture0.mask.png")


CHANGES: dict[str, tuple[Callable[[Path], object], dict[str, int]]] = {
    "an added image": (
        lambda project: projects.add_image(project, "new.png", seed=70),
        # The scores compare with all images, those of the base too.
        {"images": 1, "captions": 1, "buckets": RESOLUTIONS, "latents": RESOLUTIONS, "embeddings": 1, **TRAINED, "scores": 3},
    ),
    "a caption that another image already has": (
        lambda project: (project / "images" / "picture1.txt").write_text("picture number 0"),
        {"captions": 1, **TRAINED},
    ),
    "an image replaced under its name": (
        lambda project: projects.draw(project / "images" / "picture1.png", seed=71, size=(140, 100)),
        {"images": 1, "captions": 1, "buckets": RESOLUTIONS, "latents": RESOLUTIONS, **TRAINED, "scores": 3},
    ),
    "a renamed image": (rename, {"images": 1, "captions": 1}),
    "a removed image": (remove, {"train": STEPS}),
    "a removed image that comes back": (come_back, {"images": 1, "captions": 1, "buckets": RESOLUTIONS}),
    "an added resolution": (setting("[64, 96]", "[64, 96, 80]"), {"buckets": 4, "latents": 4, "train": STEPS}),
    "settings of runtime": (
        lambda project: (
            projects.edit(project, "[train]", "[latents]\nbatch_size = 3\nworkers = 1\n\n[train]"),
            projects.edit(project, "checkpoint_every = 1", "checkpoint_every = 2"),
        ),
        {"samples": 0},
    ),
    "a significant setting": (
        setting("[train]", '[latents]\nbackground = "#000000"\n\n[train]'),
        {"latents": 4 * RESOLUTIONS, "train": STEPS},
    ),
    "a class word": (class_word, {"captions": 4 + 1, "embeddings": 4 + 1}),
    "another mask": (mask, {"latents": RESOLUTIONS, "train": STEPS}),
    "more steps": (setting(f"steps = {STEPS}\nrank", f"steps = {STEPS + 2}\nrank"), TRAINED),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_computes_its_own_rows_and_no_others(what, project):
    change, counts = CHANGES[what]
    change(project)
    rows(project, **counts)
    assert not any(projects.written(projects.build(project, *BEFORE)).values())
    images = len(list((project / "images").glob("*[!k].png")))  # without the mask
    resolutions = RESOLUTIONS + (what == "an added resolution")
    assert projects.content(project, "latents").num_rows == projects.content(project, "buckets").num_rows == images * resolutions
    assert projects.content(project, "captions")["role"].to_pylist().count("caption") == images


def test_another_family_with_the_same_autoencoder_keeps_the_latents(project, tiny_weights, tmp_path):
    other = tmp_path / "other"
    tiny = family("tiny")
    tiny.architecture.write_random_weights(other, tiny, 5)
    shutil.rmtree(other / "vae")
    shutil.copytree(tiny_weights / "vae", other / "vae")
    texts = projects.content(project, "embeddings").num_rows
    projects.edit(project, str(tiny_weights), str(other))
    rows(project, embeddings=texts, train=STEPS, samples=3, scores=3)  # the base's too
    shutil.rmtree(other)
    assert not any(projects.written(projects.build(project)).values()), "tables are readable when the weights are gone"
