"""How a preview is drawn: as diffusers draws it, with references, guidance, averages, variants of adapters and fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from schemas.text_to_image import TRAIN
from stages.hashing import text_sha256
from stages.models import sampling
from stages.text_to_image.samples.stage import STAGE, sample_sources
from stages.tuner import checkpoint
from stages.tuner.adapters import lora
from tests import harness
from tests.stages.text_to_image.samples.previews import CONFIG, PROMPTS, SIZE, STEPS, TINY, context, pixels, tables


def drawn_by_diffusers(
    root: Path,
    prompt: str,
    seed: int,
    guidance: float,
    adapter: dict[str, mx.array] | None,
    references: Sequence[Image.Image] = (),
) -> np.ndarray:
    """By the klein pipeline, from the tables' embeddings, with the adapter merged; `references`: its argument `image`."""
    import torch
    from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Transformer2DModel

    transformer = Flux2Transformer2DModel.from_pretrained(root / "weights" / "transformer")
    for name, weight in transformer.named_parameters():
        linear = name.removesuffix(".weight")
        if adapter and linear + lora.A in adapter:
            down, up = (torch.tensor(np.array(adapter[linear + part])) for part in (lora.A, lora.B))
            weight.data += 2.0 * up @ down
    pipeline = Flux2KleinPipeline(
        FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        AutoencoderKLFlux2.from_pretrained(root / "weights" / "vae"),
        None,
        None,
        transformer,
        is_distilled=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    values = harness.tensors_of(tables()["embeddings"], "caption_id")
    embeds = {text: np.array(mx.array(values[text_sha256(text)]).view(mx.bfloat16).astype(mx.float32)) for text in (prompt, "")}
    shape = (1, TINY.transformer["in_channels"], SIZE // 16, SIZE // 16)
    image: np.ndarray = pipeline(
        image=list(references) or None,
        prompt_embeds=torch.tensor(embeds[prompt])[None],
        negative_prompt_embeds=torch.tensor(embeds[""])[None],
        latents=torch.tensor(np.array(sampling.noise(seed, shape))),
        height=SIZE,
        width=SIZE,
        num_inference_steps=STEPS,
        guidance_scale=guidance,
        output_type="np",
    ).images[0]
    return image * 255


@pytest.mark.slow
def test_a_preview_with_references_is_the_picture_that_diffusers_draws_from_them(root: Path, tmp_path: Path) -> None:
    paths = []
    for n, size in enumerate(((80, 64), (100, 70))):  # the second is cut to 96 x 64
        paths.append(str(tmp_path / f"{n}.png"))
        Image.fromarray(np.random.default_rng(n).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(paths[-1])
    config = replace(CONFIG, checkpoints=(20,), references=tuple(paths), prompt_references={PROMPTS[1]: (paths[1],)}, seeds=(5,))
    run = context(root, tmp_path / "run", config)
    shown = {PROMPTS[0]: paths, PROMPTS[1]: paths[1:]}
    adapters = {saved.step: saved.arrays(checkpoint.ADAPTER) for saved in checkpoint.find_checkpoints(root / "train")} | {0: None}
    rows = harness.run(STAGE, run).to_pylist()
    assert len(rows) == 4
    for row in rows:
        images = [Image.open(path) for path in shown[row["prompt"]]]
        expected = drawn_by_diffusers(root, row["prompt"], 5, TINY.guidance, adapters[row["step"]], images)
        assert np.abs(pixels(run, row) - expected).max() <= 0.55, (row["step"], row["prompt"])
        plain = drawn_by_diffusers(root, row["prompt"], 5, TINY.guidance, adapters[row["step"]])
        assert np.abs(expected - plain).mean() > 0.1, "the references change nothing"


def test_guidance_is_two_passes_only_where_the_family_has_real_cfg(root: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, seeds=(0,), checkpoints=())
    plain = replace(TINY, real_cfg=False)
    run = context(root, tmp_path / "a", config, family=plain)
    alone = context(root, tmp_path / "b", replace(config, guidance=1.0))
    for one, other in zip(harness.run(STAGE, run).to_pylist(), harness.run(STAGE, alone).to_pylist(), strict=True):
        np.testing.assert_array_equal(pixels(run, one), pixels(alone, other))
        np.testing.assert_allclose(pixels(run, one), drawn_by_diffusers(root, one["prompt"], 0, 1.0, None), atol=0.55)


def test_the_average_draws_where_the_setting_asks_for_it_and_the_checkpoint_has_one(root: Path, tmp_path: Path) -> None:
    (plain,) = [saved for saved in checkpoint.find_checkpoints(root / "train") if saved.step == 10]
    arrays = plain.arrays(checkpoint.ADAPTER)
    averaged = {name: value / 2 for name, value in arrays.items()}
    about = {"rank": "2", "alpha": "4.0"}
    checkpoint.save(harness.writer_into(tmp_path / "train"), 10, arrays, {}, TRAIN.batch.empty_table(), about, {}, averaged)
    checkpoint.save(harness.writer_into(tmp_path / "train"), 20, averaged, {}, TRAIN.batch.empty_table(), about, {})
    places = {"transformer": root / "weights" / "transformer", "train": tmp_path / "train"}
    run = context(root, tmp_path, weights=places)
    labels = {}
    for average in (False, True):
        run.config = replace(CONFIG, average=average)
        labels[average] = [source.label for source in sample_sources(run)]
    assert labels == {False: ["base", "step 10", "step 20"], True: ["base", "step 10, average", "step 20"]}


def test_a_base_of_fewer_bits_draws_a_preview_that_is_farther_from_that_of_the_full_base(root: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, checkpoints=(10,), base=False, seeds=(0,), first_prompts=1)
    rows = {bits: harness.run(STAGE, context(root, tmp_path / str(bits), replace(config, base_bits=bits))) for bits in (16, 8, 4)}
    drawn = {bits: pixels(context(root, tmp_path / str(bits), config), found.to_pylist()[0]) for bits, found in rows.items()}
    far = {bits: np.abs(drawn[bits] - drawn[16]).mean() for bits in (8, 4)}
    assert 0 < far[8] < far[4]


def test_a_base_on_disk_draws_the_same_pictures_and_leaves_no_file(root: Path, tmp_path: Path) -> None:
    pictures = []
    for streamed in (False, True):
        config = replace(CONFIG, checkpoints="last", seeds=(0,), first_prompts=1, base_bits=4, stream_blocks=streamed)
        run = context(root, tmp_path / str(streamed), config)
        pictures.append([pixels(run, row) for row in harness.run(STAGE, run).to_pylist()])
    kept, read = pictures
    assert len(kept) == 2 and np.array_equal(kept, read)
    assert not (tmp_path / "True" / "streamed").exists()
