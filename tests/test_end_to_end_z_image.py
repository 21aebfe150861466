"""The whole chain on a tiny Z-Image, beside what diffusers computes with the same weights, as test_end_to_end for FLUX.2."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pipeline.project.project import Project
from stages.models import sampling
from stages.text_to_image.families import family
from stages.text_to_image.train.task import ImageTask
from stages.tuner.blockwise.backprop import model_forward
from stages.tuner.loop import load_training
from tests import projects
from tests.stages.models.z_image.test_transformer import CLOSE, folded, levelled, theirs
from tests.test_end_to_end import (
    assert_exports_agree,
    assert_gradients_are_those_of,
    close,
    floats,
    mixed_batch,
    preview_of_the_base,
)

TINY = family("z-image-tiny")
GUIDANCE = 2.5  # of previews
LONG = "a long caption, whose tokens take more than one multiple of thirty-two rows in the transformer"


@pytest.fixture(scope="module")
def weights(seeded_weights: Callable[[str], Path]) -> Path:
    return seeded_weights(TINY.name)


@pytest.fixture(scope="module")
def pipe(weights: Path) -> Any:
    from diffusers import ZImagePipeline

    found = ZImagePipeline.from_pretrained(weights)
    found.set_progress_bar_config(disable=True)
    return found


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Path:
    folder = projects.make(tmp_path_factory.mktemp("z-image") / "project", weights, images=0)
    projects.edit(folder, 'family = "tiny"', f'family = "{TINY.name}"')
    projects.edit(folder, "steps = 2\n", f"steps = 2\nguidance = {GUIDANCE}\n")
    projects.edit(folder, "resolutions = [64, 96]", "resolutions = [64]")
    projects.edit(folder, "steps = 6\n", "steps = 2\nlr = 0.1\nbatch_size = 4\n")
    with (folder / "project.toml").open("a") as file:
        file.write("\n[train.validation]\nevery = 2\n")
    for number, caption in enumerate(("a cat", "a red thing on a table", LONG, LONG + ", twice")):
        projects.add_image(folder, f"picture{number}.png", number, (96, 96), caption)
    projects.build(folder)
    return folder


def test_the_latents_are_those_of_diffusers_in_patches_of_four_positions(project: Path, pipe: Any) -> None:
    import torch
    from PIL import Image

    paths = {row["image_id"]: row["path"] for row in projects.content(project, "images").to_pylist()}
    table = projects.content(project, "latents")
    for row, ours in zip(table.to_pylist(), floats(table), strict=True):
        image = Image.open(project / "images" / paths[row["image_id"]]).convert("RGB").resize((64, 64), 1)
        pixels = torch.from_numpy(np.asarray(image, np.float32) / 127.5 - 1).permute(2, 0, 1)[None]
        with torch.no_grad():
            mode = pipe.vae.encode(pixels).latent_dist.mode()
        z = ((mode - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor).numpy()
        assert row["shape"] == [64, 4, 4]
        close(ours, folded(z)[0].T.reshape(64, 4, 4))


def test_an_embedding_has_the_rows_that_diffusers_encodes_and_no_padding(project: Path, pipe: Any) -> None:
    import torch

    texts = {row["caption_id"]: row["text"] for row in projects.content(project, "captions").to_pylist()}
    table = projects.content(project, "embeddings")
    assert "" in texts.values() and len({row["tokens"] for row in table.to_pylist()}) > 3
    for row, ours in zip(table.to_pylist(), floats(table), strict=True):
        with torch.no_grad():
            (theirs,), _ = pipe.encode_prompt(
                texts[row["caption_id"]], device="cpu", do_classifier_free_guidance=False, max_sequence_length=TINY.text_tokens
            )
        assert row["shape"] == [row["tokens"], 64]
        # diffusers reads the state before the last of all layers.
        close(ours, theirs.numpy())


def test_the_losses_and_gradients_of_a_batch_of_unequal_captions_are_those_of_diffusers(project: Path, pipe: Any) -> None:
    import torch

    task = ImageTask(Project(project).open("train"))
    step, drawn = next((n, found) for n in range(1, 30) if len(found := task.draw(n)) > 1)
    assert [s.number for samples in drawn for s in samples] == list(range(4)), "the batch was divided by the rows of its texts"
    batches = [task.reader().read(step, samples) for samples in drawn]
    assert any(batch.tokens_B is not None for batch in batches)
    made = load_training(task, None)
    found = made.gradient(batches)
    model = pipe.transformer
    named = {name: value.requires_grad_() for name, value in model.named_parameters()}
    losses = []
    for batch in batches:
        *inputs, target = mixed_batch(batch, unfolded)
        losses.append((theirs(model, *inputs) - torch.tensor(target)).pow(2).mean(dim=(1, 2, 3)))
    torch.cat(losses).mean().backward()
    np.testing.assert_allclose(np.array(found.losses), torch.cat(losses).detach().numpy(), rtol=1e-4)
    assert_gradients_are_those_of(named, made, found.grads)
    model.zero_grad(set_to_none=True)
    model.requires_grad_(False)


def unfolded(x_BCHW: np.ndarray) -> np.ndarray:
    """(B, 64, h, w) as in the table -> (B, 16, 2 h, 2 w), diffusers' latent."""
    B, C, h, w = x_BCHW.shape
    return x_BCHW.reshape(B, 2, 2, C // 4, h, w).transpose(0, 3, 4, 1, 5, 2).reshape(B, C // 4, 2 * h, 2 * w)


def test_a_preview_of_the_base_is_the_picture_that_diffusers_draws(project: Path, pipe: Any) -> None:
    import torch

    row, ours = preview_of_the_base(project)
    options = {"device": "cpu", "do_classifier_free_guidance": False, "max_sequence_length": TINY.text_tokens}
    with torch.no_grad():
        with_prompt, without = (
            [each.bfloat16().float() for each in pipe.encode_prompt(text, **options)[0]] for text in (row["prompt"], "")
        )
    drawn = pipe(
        prompt_embeds=with_prompt,
        negative_prompt_embeds=without,
        latents=torch.tensor(unfolded(np.array(sampling.noise(row["seed"], (1, 64, 4, 4))))),
        height=64,
        width=64,
        num_inference_steps=2,
        guidance_scale=GUIDANCE - 1,  # diffusers adds so many differences to the prompt's prediction
        output_type="np",
    ).images[0]
    assert np.abs(ours - 255 * drawn).max() <= 1.05  # embeddings are stored in bfloat16


def test_a_latent_drawn_as_by_turbo_is_that_of_diffusers(weights: Path, pipe: Any) -> None:
    import torch

    turbo, architecture = family("z-image-turbo"), TINY.architecture
    text = np.random.default_rng(1).standard_normal((7, 64), np.float32)
    noise_BCHW = torch.tensor(unfolded(np.array(sampling.noise(3, (1, 64, 6, 4)))))
    given = {"prompt_embeds": [torch.tensor(text)], "latents": noise_BCHW, "height": 96, "width": 64}
    drawn = pipe(**given, num_inference_steps=turbo.sampling_steps, guidance_scale=0.0, output_type="latent").images
    model = architecture.load_transformer(weights / "transformer", TINY, mx.float32)
    settings = {"seed": 3, "steps": turbo.sampling_steps, "guidance": turbo.guidance}
    *_, got = architecture.draw(model, mx.array(text[None]), 96, 64, **settings)
    assert (turbo.sampling_steps, turbo.real_cfg) == (8, False)
    assert np.abs(unfolded(np.array(got)) - drawn.numpy()).max() <= CLOSE * np.abs(drawn.numpy()).max()


def test_an_exported_adapter_gives_our_velocity_in_diffusers(project: Path, weights: Path) -> None:
    import torch
    from diffusers import ZImagePipeline

    draw = np.random.default_rng(0)
    x_BCHW, text = draw.standard_normal((1, 16, 6, 8), np.float32), draw.standard_normal((7, 64), np.float32)

    def velocity(pipe: Any) -> np.ndarray:
        with torch.no_grad():
            return folded(theirs(pipe.transformer, x_BCHW, [text], np.array([0.6], np.float32)).numpy())

    def ours(adapter: Path | None) -> np.ndarray:
        architecture = TINY.architecture
        model = architecture.load_transformer(weights / "transformer", TINY, mx.float32)
        forward = model_forward(model, architecture.read_adapter(adapter) if adapter else None)
        size = x_BCHW.shape[2] // 2, x_BCHW.shape[3] // 2
        given = architecture.inputs(mx.array(folded(x_BCHW)), size, levelled([text])[0], mx.array([0.6]))
        return np.array(forward(**given))

    load = functools.partial(ZImagePipeline.from_pretrained, weights)
    assert_exports_agree(project, load, velocity, ours)
