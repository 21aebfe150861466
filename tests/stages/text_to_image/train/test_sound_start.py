"""Warnings of a run that begins wrongly, on the bundled model `micro` and on one with embedded guidance made from it. Sound runs
give none.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from schemas.text_to_image import buckets, captions, embeddings, images, latents
from stages.models.family import Family
from stages.models.flux2.load import load_flux2
from stages.models.text.encoder import TextEncoder
from stages.text_to_image.families import family
from stages.text_to_image.latents.encode import encode
from stages.text_to_image.train import objective
from stages.text_to_image.train.config import NoiseConfig, TrainConfig
from stages.text_to_image.train.sound_start import uninformed_mse
from stages.tuner.config import OptimizerConfig
from stages.tuner.loss_check import LossCheck
from stages.tuner.task import ExpectedLoss
from tests.projects import ROOT
from tests.stages.text_to_image.train.runs import Run, rows_of

pytestmark = pytest.mark.slow
MICRO, WEIGHTS = family("micro"), ROOT / "data" / "micro"
SIDE, CROPS = 128, 12
CONFIG = TrainConfig(steps=50, batch_size=4, rank=4, precision="float32", checkpoint_every=1000)
RATES = {"adamw": 1e-4, "adamw8bit": 1e-4, "adafactor": 1e-4, "lion": 2e-5, "prodigy": 1.0}
VARIANTS = ("lora", "dora", "lokr")
Tables = dict[str, pa.Table]


@dataclasses.dataclass
class MicroRun(Run):
    """A run on a model that has learned something."""

    family: Family = MICRO

    def need(self, name: str) -> Any:
        return self.family if name == "family" else self.transformer


def made_tables(pixels: list[np.ndarray], texts: list[str], record: Family = MICRO) -> Tables:
    """Return the tables of a run on pictures with captions, encoded by micro as `record` says."""
    autoencoder = MICRO.architecture.load_autoencoder(WEIGHTS / "vae", MICRO, mx.float32)
    encoder = TextEncoder(WEIGHTS / "text_encoder", WEIGHTS / "tokenizer", record, "float32")
    crops = [{"image_id": f"i{n}", "width": SIDE, "height": SIDE, "crop_w": 1.0, "crop_h": 1.0} for n in range(len(pixels))]
    words = [encode(autoencoder, each) for each in pixels]
    named = [("caption", f"i{n}", f"c{n}") for n in range(len(texts))] + [("empty", "", "empty")]
    encoded = encoder.encode([*texts, ""])
    return {
        "images": rows_of(images.IMAGES, *({"path": c["image_id"], "image_id": c["image_id"]} for c in crops)),
        "buckets": rows_of(buckets.BUCKETS, *(c | {"resolution": SIDE} for c in crops)),
        "latents": rows_of(
            latents.LATENTS,
            *(
                c | {"latent_id": f"l{n}", "shape": list(w.shape), "tensor": w.ravel().tolist()}
                for n, (c, w) in enumerate(zip(crops, words, strict=True))
            ),
        ),
        "captions": rows_of(captions.CAPTIONS, *({"role": r, "image_id": i, "caption_id": c} for r, i, c in named)),
        "embeddings": rows_of(
            embeddings.EMBEDDINGS,
            *(
                {"caption_id": c, "tokens": e.tokens, "shape": list(e.words.shape), "tensor": e.words.ravel().tolist()}
                for (_, _, c), e in zip(named, encoded, strict=True)
            ),
        ),
    }


@pytest.fixture(scope="module")
def pictures() -> tuple[list[np.ndarray], list[str]]:
    """Pixels and captions of the example."""
    folder = ROOT / "data" / "example" / "images"
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()][:CROPS]
    return [np.asarray(Image.open(folder / row["file_name"]).convert("RGB").resize((SIDE, SIDE))) for row in rows], [
        row["text"] for row in rows
    ]


@pytest.fixture(scope="module")
def sound(pictures: tuple[list[np.ndarray], list[str]]) -> Tables:
    return made_tables(*pictures)


def warnings(run: Run) -> list[str]:
    """Return what a run says about its latents, embeddings, losses and updates."""
    wanted = ("the latents", "the embeddings", "times that of", "the update", "has not moved", "not finite")
    return [line for line in run.said if any(part in line for part in wanted)]


def other_layers(monkeypatch: pytest.MonkeyPatch) -> Family:
    return replace(MICRO, text_layers=(1, 3, 5))


def other_padding(monkeypatch: pytest.MonkeyPatch) -> Family:
    from stages.models.text import tokenisation

    chat = tokenisation.CHATS[MICRO.text_kind]
    monkeypatch.setattr(tokenisation, "CHATS", {MICRO.text_kind: replace(chat, pads_left=True)})
    return MICRO


def other_normalisation(monkeypatch: pytest.MonkeyPatch) -> Family:
    from stages.models.flux2.autoencoder import Autoencoder

    flux1 = mx.array(0.1159), mx.array(1 / 0.3611)
    monkeypatch.setattr(Autoencoder, "_statistics", lambda self: flux1)
    return MICRO


MISTAKES = {
    other_layers: r"^the embeddings are not those of .*: the hidden states of the first token have the sizes 1\.2",
    other_padding: r"^the embeddings are padded at the start, where .* was trained with padding at the end",
    other_normalisation: r"^the latents have mean .* and standard deviation 0\.3\d, where the transformer was trained on 0 and 1",
}


@pytest.mark.proof("each of three planted mistakes in latents and embeddings is named before the first step")
@pytest.mark.parametrize("plant", MISTAKES, ids=lambda plant: plant.__name__)
def test_a_planted_mistake_is_named_before_the_first_step(
    plant: Callable[[pytest.MonkeyPatch], Family],
    pictures: tuple[list[np.ndarray], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cases: Callable[[int, int], int],
) -> None:
    import re

    tables = made_tables(*pictures, plant(monkeypatch))
    for seed in range(cases(1, 3)):
        run = MicroRun(tmp_path / str(seed), WEIGHTS / "transformer", replace(CONFIG, steps=1, seed=seed), tables).go()
        assert len(warnings(run)) == 1 and re.search(MISTAKES[plant], warnings(run)[0]), run.said


@pytest.fixture(scope="module")
def guided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A micro that reads a guidance value. At 1 it is micro. At 4 its predictions are those for less noise than there is, so they
    exaggerate what they see, as guidance does.
    """
    model = load_flux2(WEIGHTS / "transformer", MICRO, mx.float32)
    much_1D, little_1D = (model._embed("timestep", mx.array([sigma])) for sigma in (0.9, 0.1))
    return written_with_guidance(tmp_path_factory.mktemp("guided") / "transformer", model.config, (little_1D - much_1D)[0])


def written_with_guidance(folder: Path, config: Any, moved_D: mx.array) -> Path:
    """Write micro's transformer with a guidance embedding that gives 0 at 1 and `moved_D` at 4."""
    folder.mkdir(parents=True)
    arrays: dict[str, mx.array] = {}
    for file in (WEIGHTS / "transformer").glob("*.safetensors"):
        arrays |= mx.load(str(file))
    stem = "time_guidance_embed.timestep_embedder."
    frequencies = np.exp(-math.log(10000) * np.arange(128) / 128)
    at_1, at_4 = (np.concatenate([np.cos(1000 * g * frequencies), np.sin(1000 * g * frequencies)]) for g in (1, 4))
    only_4 = at_4 - at_1 * (at_4 @ at_1) / (at_1 @ at_1)
    first, second = np.zeros(arrays[f"{stem}linear_1.weight"].shape, np.float32), np.zeros((config.hidden,) * 2, np.float32)
    first[0] = only_4 / (only_4 @ at_4)
    second[:, 0] = np.array(moved_D) * (1 + math.exp(-1))  # SiLU(1) is 1 / (1 + 1/e)
    other = stem.replace("timestep", "guidance")
    arrays |= {f"{other}linear_1.weight": mx.array(first), f"{other}linear_2.weight": mx.array(second)}
    mx.save_safetensors(str(folder / "diffusion_pytorch_model.safetensors"), arrays)
    sizes = json.loads((WEIGHTS / "transformer" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(sizes | {"guidance_embeds": True}))
    return folder


@pytest.mark.proof("a wrong guidance in training is named before step 50, and a right one is not")
def test_a_wrong_guidance_raises_the_loss_and_is_named(
    guided: Path, sound: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cases: Callable[[int, int], int]
) -> None:
    steps, record = 8 if cases(1, 3) == 1 else 50, replace(MICRO, guidance_embedded=True)
    for seed in range(cases(1, 3)):
        config = replace(CONFIG, steps=steps, seed=seed, caption_dropout=0.0)
        for guidance, count in ((1.0, 0), (4.0, 1)):
            monkeypatch.setattr(objective, "GUIDANCE", guidance)
            run = MicroRun(tmp_path / f"{seed} {guidance}", guided, config, sound, family=record).go()
            assert len(warnings(run)) == count, run.said
        assert "times that of a model that knows nothing" in warnings(run)[0]


@pytest.mark.proof("twenty sound runs, with each optimizer and variant at its default rate, give no warning")
def test_a_sound_run_gives_no_warning(sound: Tables, tmp_path: Path, cases: Callable[[int, int], int]) -> None:
    kinds, bases = list(RATES), ("logit_normal", "uniform", "low_noise", "high_noise")
    steps = 12 if cases(1, 20) == 1 else 50
    for seed in range(cases(1, 20)):
        kind, variant = kinds[seed % len(kinds)], VARIANTS[seed % len(VARIANTS)]
        more: Any = {"optimizer": OptimizerConfig(kind=kind), "lr": RATES[kind], "variant": variant, "steps": steps}
        config = replace(CONFIG, seed=seed, noise=NoiseConfig(base=bases[seed % len(bases)]), **more)
        run = MicroRun(tmp_path / str(seed), WEIGHTS / "transformer", config, sound).go()
        assert not warnings(run), (kind, variant, run.said)


@pytest.mark.proof("500 steps of every optimizer and variant at its default rate lower the loss and end")
def test_five_hundred_steps_are_stable(sound: Tables, tmp_path: Path, cases: Callable[[int, int], int]) -> None:
    count = cases(1, len(RATES) * len(VARIANTS))
    for number in range(count):
        kind, variant = list(RATES)[number % len(RATES)], VARIANTS[number // len(RATES)]
        steps = 500 if count > 1 else 20
        config = replace(CONFIG, steps=steps, batch_size=1, optimizer=OptimizerConfig(kind=kind), lr=RATES[kind], variant=variant)
        run = MicroRun(tmp_path / f"{kind} {variant}", WEIGHTS / "transformer", config, sound).go()
        ratios = [row["loss"] / uninformed_mse(row["sigma"]) for row in run.rows if 0.4 <= row["sigma"] <= 0.9]
        assert len(run.stored) == steps and not warnings(run), (kind, variant, run.said)
        assert count == 1 or np.mean(ratios[-100:]) <= np.mean(ratios[:100]), (kind, variant)


def checked(losses: list[float], *, past: int = 0) -> list[str]:
    """Return what is said about losses of one sample per step. The first `past` of them are rows of an earlier process."""
    said: list[str] = []
    rows = [{"step": n, "split": "train", "loss": loss} for n, loss in enumerate(losses, 1)]
    expected = ExpectedLoss(lambda row: 2.0, "nobody", (0.2, 1.0), "measured", "look")
    check = LossCheck(said.append, expected, rows[:past])
    for row in rows[past:]:
        check.after(row["step"], [row])
    return said


def test_a_loss_outside_of_what_is_expected_is_named_once_also_across_a_resume() -> None:
    low, right, high = ([level + 0.01 * (n % 5) for n in range(40)] for level in (0.1, 1.0, 2.5))
    assert checked(right) == []
    assert [line.partition(" the loss")[0] for line in (*checked(low), *checked(high))] == ["step 12:", "step 12:"]
    assert checked(high)[0].endswith("1.26 times that of nobody; it should begin at 0.2 to 1 (measured): look")
    assert checked(high, past=20) == []
    assert checked([*high[:3], float("nan"), *[9.0] * 5]) == []


def test_a_loss_that_collapses_after_the_start_ends_the_run_and_one_that_was_never_low_does_not() -> None:
    said = (
        r"^train: stopped at step \d\d: the loss has collapsed, from 0\.3\d to 1\.\d\d times that of a model that knows nothing"
    )
    noise = [0.02 * (n % 5) for n in range(200)]
    with pytest.raises(ValueError, match=said):
        checked([0.6 + each for each in noise[:60]] + [4 + each for each in noise])
    assert checked([1.8 + each for each in noise]) == checked([0.6 + each for each in noise]) == []
