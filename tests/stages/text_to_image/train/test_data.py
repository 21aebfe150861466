"""Which rows a run trains on, and how often: rates by resolution and folder, the images that are held out, and wrong settings."""

from __future__ import annotations

from collections import Counter

import pytest

from pipeline.project.project import Project
from pipeline.project.recipe import recorded, settings_of
from schemas.text_to_image import CAPTIONS
from stages.text_to_image.captions.stage import CaptionsConfig
from stages.text_to_image.slider import SliderConfig
from stages.text_to_image.train.batches import build_sampler
from stages.text_to_image.train.config import DataConfig, TLoraConfig, TrainConfig, ValidationConfig
from stages.text_to_image.train.data import folder_rates, held_out, load_dataset, rates
from stages.text_to_image.train.stage import snapshot
from stages.tuner.config import OptimizerConfig
from stages.tuner.order import Order
from tests import projects

CROPS = [(512, "a.png"), (768, "a.png"), (512, "rare/b.png"), (768, "rare/very/c.png"), (512, "rare2/d.png")]
NAMES = {f"id{n}": [f"{'held' if n % 4 == 0 else 'more'}/{n}.png"] for n in range(40)}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Only the proportion of the weights counts, and the heaviest comes once.
        ({"resolutions": {"512": 1, "768": 0.25}}, [1.0, 0.25, 1.0, 0.25, 1.0]),
        ({"resolutions": {"512": 80, "768": 20}}, [1.0, 0.25, 1.0, 0.25, 1.0]),
        # Repeats are of whole folders; the longest path counts.
        ({"repeats": {"rare/": 3, "rare/very": 0, "a.png": 2}}, [2.0, 2.0, 3.0, 0.0, 1.0]),
        ({"repeats": {".": 2}, "resolutions": {"512": 1, "768": 0.5}}, [2.0, 1.0, 2.0, 1.0, 2.0]),
        # An epoch has every crop of the highest rate, however low the rates are.
        ({"repeats": {".": 0.01, "rare": 0.02}}, [0.5, 0.5, 1.0, 1.0, 0.5]),
    ],
)
def test_a_crop_has_the_rate_of_its_resolution_and_its_folder(config, expected):
    assert rates(DataConfig(**config), CROPS) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(resolutions={"512": 1}), "resolutions: 768 has no weight; 0 leaves it out; there are 512, 768"),
        (DataConfig(resolutions={"512": 1, "768": 1, "1024": 1}), "no crop has 1024; there are 512, 768"),
        (DataConfig(repeats={"rar": 2}), "no image that is trained on has the path 'rar'; did you mean \"rare\""),
    ],
)
def test_an_error_about_an_unknown_resolution_or_folder_names_the_nearest_one(config, message):
    with pytest.raises(ValueError, match=message):
        rates(config, CROPS)


def test_whether_an_image_is_held_out_does_not_depend_on_the_others():
    config = ValidationConfig(share=0.3, most=100)
    every = held_out(config, NAMES)
    assert 4 < len(every) < 20
    fewer = {name: paths for n, (name, paths) in enumerate(NAMES.items()) if n % 3}
    assert held_out(config, fewer) == every & fewer.keys()
    assert held_out(config, dict(reversed(NAMES.items()))) == every
    assert held_out(ValidationConfig(share=0.3, most=100, seed=1), NAMES) != every
    assert held_out(ValidationConfig(share=0.5, most=100), NAMES) > every
    assert len(held_out(ValidationConfig(share=0.9, most=3), NAMES)) == 3
    assert len(held_out(ValidationConfig(share=0.001), NAMES)) == 1, "at least one"


def test_paths_hold_out_every_image_that_they_match_by_any_of_its_paths():
    twin = NAMES | {"id1": ["more/1.png", "held/copy.png"]}
    assert held_out(ValidationConfig(paths=("held/*",), most=1), twin) == {"id1", *(f"id{n}" for n in range(0, 40, 4))}
    with pytest.raises(ValueError, match=r"paths: \['hold/\*'\] matches none of the 40 images"):
        held_out(ValidationConfig(paths=("hold/*",)), NAMES)


def image(folder=None, use=None, repeats=None, weight=None):
    return {"folder": folder, "use": use, "repeats": repeats, "weight": weight}


def drawn(images, regularisation=1.0, epochs=50):
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


def test_captions_are_drawn_by_their_weights_and_other_weights_are_another_run(tmp_path, tiny_weights):
    folder = projects.make(tmp_path / "project", tiny_weights, images=2)
    (folder / "images/picture0.txt").write_text("long, with all details\nshort\ntags\nshort\n")
    projects.edit(folder, "[captions]\n", '[captions]\nlines = "many"\nweights = [3, 1, 2]\n')
    projects.build(folder, "images", "captions", "buckets", "latents", "embeddings")
    run = Project(folder).open("train")
    texts = {row["caption_id"]: row["text"] for row in run.inputs.rows(CAPTIONS).to_pylist()}
    run.config = TrainConfig(steps=1, caption_dropout=0.0)
    sampler = build_sampler(run.config, load_dataset(run))
    counts = Counter(texts[sample.caption_id] for step in range(1, 1001) for batch in sampler.step(step) for sample in batch)
    of_first = {text: count for text, count in counts.items() if not text.startswith("picture")}
    shares = {text: count / sum(of_first.values()) for text, count in of_first.items()}
    assert shares == pytest.approx({"long, with all details": 3 / 8, "short": 3 / 8, "tags": 2 / 8}, abs=0.06)
    before = set(snapshot(run)["caption_id"].to_pylist())
    assert "weights [3.0, 3.0, 2.0]" in before
    projects.edit(folder, "weights = [3, 1, 2]", "weights = [1]")
    projects.build(folder, "captions")
    after = snapshot(Project(folder).open("train"))["caption_id"].to_pylist()
    assert "weights [1.0, 2.0, 1.0]" in after, "the text that is there twice"


SLIDER = SliderConfig("{caption}, old", "{caption}, young", ("a man",))


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (DataConfig, {"resolutions": {"512": 0}}, "must have a value above 0"),
        (DataConfig, {"repeats": {"a": 1e9}}, r"repeats must be >= 0 and <= 1000 each, got 1000000000.0 for 'a'"),
        (ValidationConfig, {"sigmas": (0.5, 0.5)}, "sigmas must be different levels above 0"),
        (OptimizerConfig, {"kind": "lion", "eps": 1e-6}, "eps is not a setting of lion"),
        (TrainConfig, {"base_bits_for": {"*": 5}}, r"base_bits_for must give 16, 8 or 4 bits, got 5 for '\*'"),
        (TrainConfig, {"optimizer": OptimizerConfig(kind="prodigy")}, "lr must be >= 0.01 with prodigy"),
        (TrainConfig, {"rslora": True, "variant": "lokr"}, "rslora has no effect with variant"),
        (TrainConfig, {"tlora": TLoraConfig(), "variant": "dora"}, 'tlora needs variant = "lora", got "dora"'),
        (
            TrainConfig,
            {"tlora": TLoraConfig(), "initial": "a.safetensors"},
            "initial must be unset with tlora's start",
        ),
        (TrainConfig, {"tlora": TLoraConfig(min_rank=33)}, "min_rank must be at most the rank, 32, got 33"),
        (TrainConfig, {"slider": SLIDER, "validation": ValidationConfig()}, r"validation must be unset with \[train.slider\]"),
        (
            TrainConfig,
            {"slider": SLIDER, "data": DataConfig(backwards=("*",))},
            r"backwards must be unset with \[train.slider\]",
        ),
    ],
)
def test_an_error_about_a_value_out_of_range_or_contradictory_settings_names_them(section, values, message):
    with pytest.raises(ValueError, match=message):
        section(**values)


def test_a_feature_that_is_not_set_is_in_no_recipe():
    assert not {"tlora", "rank_dropout", "beneath", "slider"} & recorded(TrainConfig()).keys()
    assert "slider" not in recorded(CaptionsConfig()) and "backwards" not in settings_of(TrainConfig()).get("data", {})
