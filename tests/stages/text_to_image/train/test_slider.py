"""Sliders: the authors' target at both signs, on drawings of the neutral prompts, and no trace in runs without one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from pipeline.project.recipe import settings_of
from schemas.text_to_image import CAPTIONS, DRAWINGS, EMBEDDINGS, IMAGES
from stages.hashing import text_sha256
from stages.text_to_image.slider import SliderConfig
from stages.text_to_image.train.config import DataConfig, ValidationConfig
from stages.text_to_image.train.stage import STAGE
from stages.tuner.blockwise.backprop import predict_base
from stages.tuner.diffusion import moved
from tests.harness import rows_of
from tests.stages.text_to_image.train.runs import BASE, Run, embedded, words

SLIDER = SliderConfig("{caption}, old", "{caption}, young", ("a man", "a cat"), guidance=3.0)
TEXTS = ["", *SLIDER.neutral, *(pole for text in SLIDER.neutral for pole in SLIDER.poles(text))]
CONFIG = replace(BASE, slider=SLIDER, batch_size=4)


def drawn():
    """The tables of a slider: no picture, a drawing of each neutral prompt at two seeds."""
    captions = [("neutral", text) for text in SLIDER.neutral] + [("empty", "")]
    size = {"width": 96, "height": 64, "shape": [128, 4, 6]}
    drawings = [
        {"latent_id": f"drawing{n}", "image_id": f"content{n}", "caption_id": text_sha256(text), "seed": seed}
        for n, (text, seed) in enumerate(itertools.product(SLIDER.neutral, (0, 1)))
    ]
    return {
        "images": rows_of(IMAGES),
        "captions": rows_of(
            CAPTIONS, *({"role": role, "caption_id": text_sha256(text), "text": text} for role, text in captions)
        ),
        "embeddings": rows_of(EMBEDDINGS, *embedded(0, *map(text_sha256, TEXTS))),
        "drawings": rows_of(DRAWINGS, *(row | size | {"tensor": words((128, 4, 6), 50 + n)} for n, row in enumerate(drawings))),
    }


def test_the_target_is_that_of_the_authors_code_at_both_signs():
    torch = pytest.importorskip("torch")
    draw = np.random.default_rng(0)
    predicted, neutral, positive, unconditional = (draw.normal(size=(2, 6, 8)).astype(np.float32) for _ in range(4))
    t = {"neutral": neutral, "positive": positive, "unconditional": unconditional}
    t = {name: torch.from_numpy(value) for name, value in t.items()}
    # PromptEmbedsPair of github.com/rohitgandikota/sliders, train-scripts/textsliders/prompt_util.py.
    enhance = t["neutral"] + 4.0 * (t["positive"] - t["unconditional"])
    erase = t["neutral"] - 4.0 * (t["positive"] - t["unconditional"])
    for guidance, theirs in ((4.0, enhance), (-4.0, erase)):
        ours = moved(*map(mx.array, (neutral, positive, unconditional)), guidance)
        np.testing.assert_allclose(np.array(ours), theirs.numpy(), atol=1e-5)
        loss = float(torch.nn.functional.mse_loss(torch.from_numpy(predicted), theirs))
        assert float(mx.mean(mx.square(mx.array(predicted) - ours))) == pytest.approx(loss, abs=1e-5)


def test_a_step_trains_both_signs_each_against_the_base_moved_its_way(transformer, tmp_path):
    run = Run(tmp_path, transformer, CONFIG, drawn())
    training, seen = run.training(), {}
    for batch in run.micro_batches():
        (term,) = training.objective.terms(training.model, batch)
        texts = {sample.crop.captions[0]: sample.crop.poles for sample in batch.samples}
        assert all(len(poles) == 2 for poles in texts.values())
        x_BLC, _ = training.objective.mix(batch)
        inputs = [dict(term.inputs), *(training.objective.inputs(batch, x_BLC, *each) for each in batch.poles)]
        neutral, positive, negative = (predict_base(training.model, each) for each in inputs)
        expected = neutral + term.strength * 3.0 * (positive - negative)
        np.testing.assert_allclose(np.array(term.loss(expected)), 0, atol=1e-5)
        assert float(mx.min(term.loss(neutral))) > 1e-3
        seen[term.strength] = len(batch.samples)
    assert seen == {1.0: 2, -1.0: 2}


def test_at_strength_minus_1_the_adapter_gets_the_opposite_gradient(transformer, tmp_path):
    run = Run(tmp_path, transformer, CONFIG, drawn())
    training, batch = run.training(), run.micro_batches()[0]
    (term,) = training.objective.terms(training.model, batch)
    found = [training._loss_and_grads(batch, replace(term, strength=strength), training.adapter)[1] for strength in (1.0, -1.0)]
    largest = max(float(mx.abs(value).max()) for value in found[0].values())
    for key, value in found[0].items():  # B is zero, so the prediction is the same at both
        np.testing.assert_allclose(np.array(value), -np.array(found[1][key]), atol=1e-6 * largest)
    assert run.task().metadata["slider"] == "{caption}, old | {caption}, young"


def test_a_run_depends_on_the_drawings_and_the_prompts_of_its_slider(transformer, tmp_path):
    assert settings_of(CONFIG)["slider"]["positive"] == "{caption}, old"
    rows = STAGE.snapshot(Run(tmp_path, transformer, CONFIG, drawn()).context()).to_pylist()
    read = {(row["latent_id"], row["image_id"], row["caption_id"]) for row in rows}
    assert ("drawing0", "content0", text_sha256("a man, young")) in read and ("", "", text_sha256("")) in read


def test_a_slider_beside_pictures_or_with_equal_poles_is_refused(transformer, tmp_path):
    tables = drawn() | {"images": rows_of(IMAGES, {"path": "a.png", "image_id": "a"})}
    with pytest.raises(ValueError, match=r"not on pictures, of which there are 1; set \[images\] folder = \[\]"):
        Run(tmp_path, transformer, CONFIG, tables).go()
    with pytest.raises(ValueError, match="negative must be another prompt than positive"):
        SliderConfig("old", "old", ("a",))


def test_pictures_of_the_other_end_are_trained_at_strength_minus_1_in_batches_of_their_own(transformer, tmp_path):
    other_end = {"image1", "image2"}
    run = Run(tmp_path, transformer, replace(BASE, data=DataConfig(backwards=("image[12]",)), batch_size=4))
    task = run.task()
    signs = {-1.0: set(), 1.0: set()}
    for step in range(1, 20):
        for samples in task.draw(step):
            assert len({sample.strength for sample in samples}) == 1
            signs[samples[0].strength] |= {sample.crop.image_id for sample in samples}
    assert signs == {-1.0: other_end, 1.0: {f"image{n}" for n in range(7)} - other_end}
    training = run.training()
    for batch in run.micro_batches():
        (term,) = training.objective.terms(training.model, batch)
        assert term.strength == batch.samples[0].strength


@pytest.mark.parametrize(
    ("paths", "held_out", "message"),
    [
        (("old/*",), None, "matches none of the 7 images"),
        (("*",), None, "leaves no image that is trained at strength 1"),
        (("image[12]",), ValidationConfig(share=1.0, most=100), "leaves no image that is trained at strength 1"),
    ],
)
def test_a_slider_of_pictures_needs_pictures_of_both_ends_and_holds_none_of_the_other_out(
    paths, held_out, message, transformer, tmp_path
):
    config = replace(BASE, data=DataConfig(backwards=paths), validation=held_out)
    with pytest.raises(ValueError, match=message):
        Run(tmp_path, transformer, config).task()
