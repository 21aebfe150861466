"""How often images are drawn, by their folder, and captions, by their weight: counted in the draws of a run."""

from collections import Counter

import pytest

from pipeline.project.project import Project
from schemas.text_to_image.captions import CAPTIONS
from stages.text_to_image.train.batches import build_sampler
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.train.data import folder_rates, load_dataset
from stages.text_to_image.train.stage import snapshot
from stages.tuner.order import Order
from tests import projects


def image(folder=None, use=None, repeats=None, weight=None):
    return {"folder": folder, "use": use, "repeats": repeats, "weight": weight}


def drawn(images, regularisation=1.0, epochs=50):
    """Count the draws of each folder over whole epochs."""
    rates = folder_rates([1.0] * len(images), images, regularisation)
    order = Order(["shape"] * len(images), 1, 0, 1, rates)
    steps = round(order.per_epoch * epochs)
    return Counter(images[row]["folder"] for step in range(1, steps + 1) for batch in order.step(step) for row in batch.rows)


def test_an_image_occurs_as_often_as_its_folder_repeats():
    counts = drawn([*[image("10_cat", repeats=10.0)] * 3, *[image()] * 2])
    assert counts == {"10_cat": 50 * 3 * 10, None: 50 * 2}


def test_folders_are_drawn_in_proportion_to_their_weights_whatever_they_hold():
    counts = drawn([*[image("a", weight=2.0)] * 3, *[image("b", weight=1.0)] * 12])
    assert counts["a"] == pytest.approx(2 * counts["b"], rel=0.01)
    assert counts["b"] == 50 * 12  # every image at least once per epoch


def test_regularisation_images_are_drawn_as_often_as_all_others_together_whatever_they_are():
    subject = [image("10_cat", repeats=10.0)] * 3
    for count in (2, 200):
        of_class = [image("reg", "regularisation")] * count
        counts = drawn([*subject, *of_class])
        assert counts["reg"] == pytest.approx(counts["10_cat"], rel=0.01)
    half = drawn([*subject, *of_class], regularisation=0.5)
    assert half["reg"] == pytest.approx(half["10_cat"] / 2, rel=0.01)
    assert drawn([*subject, *of_class], regularisation=0.0)["reg"] == 0


def test_without_rules_nothing_changes():
    assert folder_rates([0.5, 2.0], [image(), image()], 1.0) == [0.5, 2.0]


def test_captions_are_drawn_by_their_weights_and_other_weights_are_another_run(tmp_path, tiny_weights):
    folder = projects.make(tmp_path / "project", tiny_weights, images=2)
    (folder / "images/picture0.txt").write_text("long, with all details\nshort\ntags\nshort\n")
    projects.edit(folder, "[captions]\n", '[captions]\nlines = "many"\nweights = [3, 1, 2]\n')
    projects.build(folder, "images", "captions", "buckets", "latents", "embeddings")
    run = Project(folder).open("train")
    texts = {row["caption_id"]: row["text"] for row in run.inputs.rows(CAPTIONS).to_pylist()}
    run.config = TrainConfig(steps=1, caption_dropout=0.0)
    sampler = build_sampler(run.config, load_dataset(run))
    counts = Counter(texts[sample.caption_id] for step in range(1, 4001) for batch in sampler.step(step) for sample in batch)
    of_first = {text: count for text, count in counts.items() if not text.startswith("picture")}
    shares = {text: count / sum(of_first.values()) for text, count in of_first.items()}
    assert shares == pytest.approx({"long, with all details": 3 / 8, "short": 3 / 8, "tags": 2 / 8}, abs=0.03)
    before = set(snapshot(run)["caption_id"].to_pylist())
    assert "weights [3.0, 3.0, 2.0]" in before
    projects.edit(folder, "weights = [3, 1, 2]", "weights = [1]")
    projects.build(folder, "captions")
    after = snapshot(Project(folder).open("train"))["caption_id"].to_pylist()
    assert "weights [1.0, 2.0, 1.0]" in after, "the text that is there twice"
