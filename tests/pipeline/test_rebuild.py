"""How many rows of each table a change to a project makes the program compute again, as the plan foretells. All others are
reused.
"""

import shutil
from pathlib import Path

import pytest
from PIL import Image

from pipeline.project.project import Project
from stages.text_to_image import PIPELINE
from stages.text_to_image.families import family
from tests import projects

NO_ROWS = dict.fromkeys(PIPELINE.stages, 0)
pytestmark = pytest.mark.slow
FORETOLD = ("images", "captions", "buckets", "latents", "embeddings", "train")
STEPS = 2
CHECKPOINTS = 2  # each with a picture; the base has another
RESOLUTIONS = 2
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
    """All stages write exactly these numbers of rows, by table, as the plan foretells."""
    plan = projects.planned(Project(folder))
    found = projects.written(projects.build(folder))  # one new image may change the warnings of others
    assert found == NO_ROWS | {"checks": found["checks"]} | changed
    assert {name: plan[name].missing for name in FORETOLD} == {name: found[name] for name in FORETOLD}


def test_an_added_image_computes_its_own_rows(project):
    projects.add_image(project, "new.png", seed=70)
    chain = {"images": 1, "captions": 1, "buckets": RESOLUTIONS, "latents": RESOLUTIONS, "embeddings": 1, "train": STEPS}
    rows(project, **chain, samples=CHECKPOINTS, scores=CHECKPOINTS + 1)  # the scores compare with all images
    rows(project)


def test_a_caption_that_another_image_already_has_computes_no_embedding(project):
    (project / "images" / "picture1.txt").write_text("picture number 0")
    rows(project, captions=1, train=STEPS, samples=CHECKPOINTS, scores=CHECKPOINTS)


def test_an_image_replaced_under_its_name_computes_its_own_rows(project):
    projects.draw(project / "images" / "picture1.png", seed=71, size=(140, 100))
    chain = {"images": 1, "captions": 1, "buckets": RESOLUTIONS, "latents": RESOLUTIONS, "train": STEPS}
    rows(project, **chain, samples=CHECKPOINTS, scores=CHECKPOINTS + 1)


def test_a_renamed_image_computes_no_latent(project):
    for suffix in (".png", ".txt"):
        (project / "images" / f"picture1{suffix}").rename(project / "images" / f"renamed{suffix}")
    outcome = projects.written(projects.build(project))
    assert (outcome["images"], outcome["latents"], outcome["embeddings"]) == (1, 0, 0)


def test_a_removed_image_computes_no_encoding_and_its_rows_vanish(project):
    (project / "images" / "picture1.png").unlink()
    (project / "images" / "picture1.txt").unlink()
    rows(project, train=STEPS, samples=CHECKPOINTS, scores=CHECKPOINTS + 1)
    assert projects.content(project, "latents").num_rows == 3 * RESOLUTIONS
    assert projects.content(project, "captions").num_rows == 3 + 2
    rows(project)


def test_a_removed_image_that_comes_back_computes_no_encoding(project):
    aside = project / "aside.png"
    (project / "images" / "picture1.png").rename(aside)
    projects.build(project, "images", "captions", "buckets", "latents", "embeddings")
    aside.rename(project / "images" / "picture1.png")
    outcome = projects.written(projects.build(project))
    assert (outcome["images"], outcome["buckets"], outcome["latents"], outcome["embeddings"]) == (1, RESOLUTIONS, 0, 0)


def test_an_added_resolution_computes_only_its_crops(project):
    projects.edit(project, "[64, 96]", "[64, 96, 80]")
    rows(project, buckets=4, latents=4, train=STEPS, samples=CHECKPOINTS, scores=CHECKPOINTS)


def test_a_runtime_setting_computes_nothing(project):
    projects.edit(project, "[train]", "[latents]\nbatch_size = 3\nworkers = 1\n\n[train]")
    projects.edit(project, "checkpoint_every = 1", "checkpoint_every = 2")
    rows(project)


def test_a_significant_setting_computes_its_stage_and_what_reads_it(project):
    projects.edit(project, "[train]", '[latents]\nbackground = "#000000"\n\n[train]')
    rows(project, latents=4 * RESOLUTIONS, train=STEPS, samples=CHECKPOINTS, scores=CHECKPOINTS + 1)  # the base's too


def test_a_mask_computes_the_latents_of_its_image_and_so_does_another(project):
    projects.edit(project, "[train]", '[latents]\nmask = "file"\n\n[train]')
    for grey in (255, 128):
        Image.new("L", (160, 120), grey).save(project / "images" / "picture0.mask.png")
        rows(project, latents=RESOLUTIONS, train=STEPS, samples=CHECKPOINTS, scores=CHECKPOINTS)
        masks = projects.content(project, "latents")["mask"].to_pylist()
        assert {byte for tokens in masks if tokens for byte in tokens} == {grey}
        assert sum(tokens is not None for tokens in masks) == RESOLUTIONS


def test_a_class_word_computes_its_own_captions_and_embeddings_alone(project):
    projects.edit(project, "[captions]", '[captions]\ntrigger = "picture"')
    rows(project, captions=4 + 3, embeddings=1)
    projects.edit(project, 'trigger = "picture"', 'trigger = "picture"\nclass_word = "thing"')
    rows(project, captions=4 + 1, embeddings=4 + 1)


def test_more_steps_go_on_from_the_last(project):
    projects.edit(project, f"steps = {STEPS}\nrank", f"steps = {STEPS + 2}\nrank")
    outcome = projects.written(projects.build(project))
    assert outcome["train"] == 2 and outcome["latents"] == outcome["embeddings"] == 0


def test_another_family_with_the_same_autoencoder_keeps_the_latents(project, tiny_weights, tmp_path):
    other = tmp_path / "other"
    tiny = family("tiny")
    tiny.architecture.write_random_weights(other, tiny, 5)
    shutil.rmtree(other / "vae")
    shutil.copytree(tiny_weights / "vae", other / "vae")
    texts = projects.content(project, "embeddings").num_rows
    projects.edit(project, str(tiny_weights), str(other))
    rows(project, embeddings=texts, train=STEPS, samples=CHECKPOINTS + 1, scores=CHECKPOINTS + 1)


def test_tables_are_readable_when_the_weights_are_gone(project, tiny_weights, tmp_path):
    gone = tmp_path / "gone"
    shutil.copytree(tiny_weights, gone)
    projects.edit(project, str(tiny_weights), str(gone))
    projects.build(project)
    shutil.rmtree(gone)
    assert projects.written(projects.build(project)) == NO_ROWS
