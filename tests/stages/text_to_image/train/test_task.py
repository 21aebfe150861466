"""What a step draws and reads, over tables in memory: rates, dropped captions, class captions, masks, held-out images."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from pipeline.project.stage_run import ArrayReader
from schemas.text_to_image import BUCKETS, CAPTIONS, EMBEDDINGS, IMAGES, LATENTS
from stages.text_to_image.families import family
from stages.text_to_image.train.config import (
    DataConfig,
    MaskConfig,
    NoiseConfig,
    PreservationConfig,
    TrainConfig,
    ValidationConfig,
)
from stages.text_to_image.train.memory import largest_batch
from stages.text_to_image.train.task import ImageTask
from stages.tuner import draws
from stages.tuner.loop import Loader
from tests.harness import rows_of

IMAGE_COUNT = 6
FIRST_WITHOUT_SETTINGS = [(5, 768, "text5", 0.6115), (1, 768, "nothing", 0.7483), (4, 512, "text4", 0.9776)]


class Project:
    """Images 0 .. 5 at two resolutions, mirrored too; 3 to 5 in a folder; 0 has two captions; 1 has no trigger, 2 a mask."""

    def __init__(self, dropout=0.0):
        folder = ["", "", "", "rare/", "rare/", "rare/"]
        images = [{"path": f"{folder[n]}{n}.png", "image_id": f"image{n}"} for n in range(IMAGE_COUNT)]
        sizes = {512: (32, 48), 768: (48, 48)}
        places = [
            {"image_id": f"image{n}", "width": w, "height": h, "crop_w": 1.0 * w, "resolution": r}
            for n in range(IMAGE_COUNT)
            for r, (w, h) in sizes.items()
        ]
        latents = [
            {name: place[name] for name in ("image_id", "width", "height", "crop_w")}
            | {"latent_id": f"{place['image_id']}/{place['resolution']}/{flip}", "flip": flip}
            | {
                "shape": [2, place["height"] // 16, place["width"] // 16],
                "tensor": [7] * (2 * place["width"] * place["height"] // 256),
            }
            | {"mask": bytes([0, 255] * 3) if place["image_id"] == "image2" and place["resolution"] == 512 else None}
            for place in places
            for flip in (False, True)
        ]
        texts = [("caption", f"image{n}", f"text{n}", 0) for n in range(IMAGE_COUNT)]
        texts += [("caption", "image0", "other0", 1), ("empty", "", "nothing", 0), ("trigger", "", "word", 0)]
        texts += [("class", f"image{n}", f"class{n}", 0) for n in range(IMAGE_COUNT) if n != 1] + [("class", "", "kind", 0)]
        captions = [{"role": r, "image_id": i, "caption_id": c, "position": p, "text": c} for r, i, c, p in texts]
        embeddings = [{"caption_id": c, "shape": [2, 3], "tensor": [n] * 6} for n, (_, _, c, _) in enumerate(texts)]
        self.tables = {
            "images": rows_of(IMAGES, *images),
            "buckets": rows_of(BUCKETS, *places),
            "latents": rows_of(LATENTS, *latents),
            "captions": rows_of(CAPTIONS, *captions),
            "embeddings": rows_of(EMBEDDINGS, *embeddings),
        }
        self.inputs, self.needs = self, {"family": family("tiny")}
        self.config = TrainConfig(batch_size=2, caption_dropout=dropout, noise=NoiseConfig("uniform", shift="none"))

    def rows(self, schema):
        return self.tables[schema.name].drop_columns(["tensor"] if schema.tensors else [])

    def tensors(self, schema):
        return ArrayReader(self.tables[schema.name], schema)

    def once(self, compute):
        return compute(self)

    def without(self, name, role):
        column = self.tables[name]["role"]
        self.tables[name] = self.tables[name].filter(pa.compute.not_equal(column, role))
        return self


def dataset(project, **settings):
    return task(project, **settings).data


def task(project, **settings):
    project.config = replace(project.config, **settings)
    return ImageTask(project)


def drawn(made, steps):
    return [sample for step in range(1, steps + 1) for batch in made.draw(step) for sample in batch]


def test_without_settings_the_first_draws_are_these_three():
    made = task(Project(0.3), batch_size=1)
    assert made.data.rates is None
    found = [(int(s.crop.image_id[-1]), s.crop.width * 16, s.caption_id, round(s.sigma, 4)) for s in drawn(made, 3)]
    assert found == FIRST_WITHOUT_SETTINGS


def test_the_largest_batch_is_found_among_crops_that_the_first_epochs_do_not_have():
    made = task(Project(), data=DataConfig(resolutions={"512": 1, "768": 0.01}), batch_size=3)
    assert {sample.crop.width for sample in drawn(made, 8)} == {32}
    batch = largest_batch(made.sampler, 16)
    assert (batch.samples, batch.width, batch.height, batch.text_rows) == (3, 48, 48, 2)


def test_crops_that_are_left_out_are_neither_drawn_nor_needed():
    project = Project()
    project.tables["embeddings"] = project.tables["embeddings"].filter(
        pa.compute.invert(pa.compute.is_in(project.tables["embeddings"]["caption_id"], pa.array(["text3", "text4", "text5"])))
    )
    data = dataset(project, data=DataConfig(repeats={"rare": 0}, resolutions={"512": 0, "768": 1}))
    assert {(crop.image_id, crop.width) for crop in data.crops} == {(f"image{n}", 48) for n in range(3)}
    assert data.rates is None
    with pytest.raises(ValueError, match="resolutions and repeats leave out all 24 crops"):
        dataset(Project(), data=DataConfig(repeats={".": 0}))


def test_a_dropped_caption_becomes_the_empty_one_or_the_trigger():
    for config, text, made in ((DataConfig(), "nothing", ""), (DataConfig(dropped="trigger"), "word", "kind")):
        samples = drawn(task(Project(0.5), data=config, preservation=PreservationConfig()), 30)
        assert {(s.caption_id, s.class_id) for s in samples if s.dropped} == {(text, made)}
        assert {s.dropped for s in samples} == {True, False}
    with pytest.raises(ValueError, match=r'dropped = "trigger": captions has no such row; set trigger in \[captions\]'):
        dataset(Project(0.5).without("captions", "trigger"), data=DataConfig(dropped="trigger"))


def test_a_dropped_caption_leaves_the_trigger_of_the_pictures_own_folder():
    several = Project(0.5)
    images = several.tables["images"]
    own = pa.array(["dog", "word", "", None, None, None], pa.string())
    several.tables["images"] = images.set_column(images.column_names.index("trigger"), "trigger", own)
    rows = [{"role": "trigger", "caption_id": "dog", "text": "dog", "position": 1}]
    rows += several.without("captions", "empty").tables["captions"].to_pylist()
    rows += [{"role": "empty", "caption_id": "nothing", "text": ""}]
    several.tables["captions"] = rows_of(CAPTIONS, *rows)
    words = [{"caption_id": "dog", "shape": [2, 3], "tensor": [9] * 6}]
    several.tables["embeddings"] = pa.concat_tables([several.tables["embeddings"], rows_of(EMBEDDINGS, *words)])
    made = task(several, data=DataConfig(dropped="trigger"))
    found = {s.crop.image_id: s.caption_id for s in drawn(made, 120) if s.dropped}
    assert found == {"image0": "dog", "image2": "nothing"} | dict.fromkeys(["image1", "image3", "image4", "image5"], "word")
    assert {caption for _, image, caption in made.data.pairs() if image == "image0"} == {"text0", "other0", "dog"}
    assert not any(crop.dropped for crop in dataset(several, data=DataConfig()).crops)


def test_class_captions_are_read_in_every_so_many_steps_and_weigh_nothing_for_samples_without_one():
    project = Project(0.3)
    made = task(project, batch_size=12, preservation=PreservationConfig(every=2))
    words = ArrayReader(project.tables["embeddings"], EMBEDDINGS)
    seen = set()
    for step, batches, _ in Loader(made, range(1, 9)):
        for batch in batches:
            assert (batch.class_BTJ is None) == bool(step % 2)
            for n, sample in enumerate(batch.samples if batch.class_BTJ is not None else []):
                assert sample.class_id in ("", sample.caption_id.replace("text", "class"))
                assert batch.class_B[n] == bool(sample.class_id)
                assert np.array_equal(batch.class_BTJ[n], words.read(sample.class_id or sample.caption_id))
                seen.add((sample.caption_id[:4], bool(sample.class_id), sample.crop.image_id))
    assert ("text", True, "image0") in seen and ("othe", False, "image0") in seen and ("text", False, "image1") in seen
    with pytest.raises(ValueError, match="set trigger and class_word"):
        dataset(Project().without("captions", "class"), preservation=PreservationConfig())


def test_masks_are_read_as_token_weights_and_only_for_batches_that_have_any():
    project = Project()
    made = task(project, batch_size=12, mask=MaskConfig(0.2))
    batches = [batch for _, batches, _ in Loader(made, range(1, 3)) for batch in batches]
    assert {batch.mask_BL is None for batch in batches} == {True, False}
    (batch,) = [batch for batch in batches if batch.mask_BL is not None]
    assert batch.mask_BL.shape == (12, 6) and batch.mask_BL.dtype == np.float32
    for sample, weights in zip(batch.samples, batch.mask_BL, strict=True):
        floor = np.float32(0.2)
        assert weights.tolist() == ([floor, 1.0] * 3 if sample.crop.image_id == "image2" else [1.0] * 6)
    assert all(m.mask_BL is None for _, ms, _ in Loader(task(project, mask=None), range(1, 20)) for m in ms)
    project.tables["latents"] = rows_of(LATENTS, *[r | {"mask": None} for r in project.tables["latents"].to_pylist()])
    with pytest.raises(ValueError, match="no crop has a mask"):
        dataset(project, mask=MaskConfig())


HELD = ValidationConfig(share=0.3, every=10, sigmas=(0.25, 0.5), patience=2)


def test_held_out_images_are_never_trained_on_and_measured_without_flips():
    data = dataset(Project(), validation=HELD)
    trained, held = ({crop.image_id for crop in crops} for crops in (data.crops, data.held))
    assert held and not trained & held and trained | held == {f"image{n}" for n in range(IMAGE_COUNT)}
    assert len(data.held) == 2 * len(held) and all(crop.latent_id.endswith("False") for crop in data.held)
    assert {pair[1] for pair in data.pairs() if pair[0]} == trained | held
    with pytest.raises(ValueError, match="all 6 images are held out; lower share, or name fewer paths"):
        dataset(Project(), validation=ValidationConfig(paths=("*",)))


def test_every_measurement_has_every_crop_at_every_level_in_batches_of_one_shape_with_the_same_noise():
    held_out = task(Project(), batch_size=3, validation=HELD).held_out
    first, again = list(held_out.micro_batches()), list(held_out.micro_batches())
    samples = [sample for batch in first for sample in batch.samples]
    assert [s.number for s in samples] == list(range(held_out.count)) and held_out.count == 2 * len(held_out.crops)
    assert {(s.crop.latent_id, s.sigma) for s in samples} == {(c.latent_id, s) for c in held_out.crops for s in (0.25, 0.5)}
    for batch, other in zip(first, again, strict=True):
        assert len({sample.crop.width for sample in batch.samples}) == 1 and len(batch.samples) <= 3
        assert np.array_equal(batch.noise_BCHW, other.noise_BCHW)
        for sample, noise in zip(batch.samples, batch.noise_BCHW, strict=True):
            assert np.array_equal(noise, draws.normal(noise.shape, HELD.seed, f"validation {sample.crop.latent_id}"))
