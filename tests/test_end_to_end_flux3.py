"""The whole chain on a tiny FLUX 3 Image, beside what diffusers computes with the same weights, as test_end_to_end for FLUX.2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pipeline.project.project import Project
from stages.models import sampling
from stages.models.text.encoder import widen
from stages.text_to_image.families import family
from stages.text_to_image.sampler import Adapters, load_sampler
from stages.text_to_image.samples.config import SamplesConfig
from stages.text_to_image.samples.drawing import encode_image, read_reference
from stages.text_to_image.train.task import ImageTask
from stages.tuner.blockwise.backprop import model_forward
from stages.tuner.loop import load_training
from tests import projects
from tests.stages.models.flux3.test_transformer import given, ours, prepared, random_reference, theirs, windows
from tests.test_end_to_end import assert_exports_agree, assert_gradients_are_those_of, floats, mixed_batch, preview_of_the_base

TINY = family("flux3-tiny")
GUIDANCE = 2.5  # of previews
LONG = " ".join(["a long caption whose tokens take more rows than one window of the transformer has"] * 6)
EDIT = "the same at night"
STEPS, SIDE = 2, 64


@pytest.fixture(scope="module")
def weights(seeded_weights: Callable[[str], Path]) -> Path:
    return seeded_weights(TINY.name)


def pipeline(weights: Path, distilled: bool = False) -> Any:
    """diffusers' modular pipeline, from embeddings and latents on."""
    from diffusers import AutoencoderKLFlux2, ClassifierFreeGuidance, FlowMatchEulerDiscreteScheduler, Flux3Transformer2DModel
    from diffusers.modular_pipelines.flux3.modular_blocks_flux3 import Flux3AutoBlocks
    from diffusers.modular_pipelines.flux3.modular_blocks_flux3_distilled import Flux3DistilledAutoBlocks

    blocks: Any = Flux3DistilledAutoBlocks() if distilled else Flux3AutoBlocks()
    for name in ("prompt_upsampler", "text_encoder", "vae_encoder"):
        blocks.sub_blocks.pop(name)
    pipe = blocks.init_pipeline()
    pipe.update_components(
        transformer=Flux3Transformer2DModel.from_pretrained(weights / "transformer"),
        vae=AutoencoderKLFlux2.from_pretrained(weights / "vae"),
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(weights / "scheduler"),
    )
    if not distilled:
        pipe.update_components(guider=ClassifierFreeGuidance(guidance_scale=GUIDANCE))
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path, weights: Path) -> Path:
    folder = projects.make(tmp_path_factory.mktemp("flux3") / "project", tiny_weights, images=0)
    projects.edit(folder, "steps = 2\n", f"steps = {STEPS}\nguidance = {GUIDANCE}\n")
    projects.edit(folder, 'preview_prompts = ["a red thing"]', f'preview_prompts = ["a red thing", "{EDIT}"]')
    projects.edit(folder, "[samples]\n", f'[samples]\nprompt_references = {{ "{EDIT}" = ["images/control/picture1.png"] }}\n')
    projects.edit(folder, "resolutions = [64, 96]", f"resolutions = [{SIDE}]")
    projects.edit(folder, "steps = 6\n", "steps = 2\nlr = 0.1\nbatch_size = 4\n")
    for number, caption in enumerate(("a cat", "a red thing on a table", LONG, LONG + ", twice")):
        projects.add_image(folder, f"picture{number}.png", number, (96, 96), caption)
    (folder / "images" / "control").mkdir()
    projects.draw(folder / "images" / "control" / "picture1.png", 7, (96, 96))
    projects.build(folder, "images", "captions", "checks", "buckets", "latents")  # as a project of FLUX.2
    projects.edit(folder, 'family = "tiny"', f'family = "{TINY.name}"')
    projects.edit(folder, str(tiny_weights), str(weights))
    return folder


@pytest.fixture(scope="module")
def built(project: Path) -> Path:
    projects.build(project)
    return project


def test_the_latents_of_a_flux2_project_are_kept_if_the_autoencoder_is_the_same(project: Path) -> None:
    assert projects.written(projects.build(project, "latents")) == {"latents": 0}


def test_an_embedding_has_the_rows_of_its_text_and_one_of_padding(built: Path) -> None:
    rows = projects.content(built, "embeddings").to_pylist()
    assert {row["tokens"] > 80 for row in rows} == {True, False}
    assert all(row["shape"] == [row["tokens"] + (row["tokens"] % 80 > 0), 192] for row in rows)


def test_the_losses_and_gradients_of_a_batch_of_unequal_captions_and_a_reference_are_those_of_diffusers(
    built: Path, weights: Path
) -> None:
    import torch

    task = ImageTask(Project(built).open("train"))
    reader = task.reader()
    steps = ((n, [reader.read(n, samples) for samples in task.draw(n)]) for n in range(1, 60))
    batches = next(found for _, found in steps if any(b.references for b in found) and any(b.tokens_B is not None for b in found))
    made = load_training(task, None)
    found = made.gradient(batches)
    model = pipeline(weights).transformer
    named = {name: value.requires_grad_() for name, value in model.named_parameters()}
    losses = []
    for batch in batches:
        *inputs, target = mixed_batch(batch)
        velocity = theirs(model, *inputs, None, [widen(each) for each in batch.references])
        losses.append((velocity - torch.tensor(target).flatten(2).transpose(1, 2)).pow(2).mean(dim=(1, 2)))
    torch.cat(losses).mean().backward()
    np.testing.assert_allclose(np.array(found.losses), torch.cat(losses).detach().numpy(), rtol=1e-4)
    assert any("image_cond" in target.name for target in made.targets)
    assert_gradients_are_those_of(named, made, found.grads)


@pytest.mark.parametrize("prompt", ["a red thing", EDIT])
def test_a_preview_of_the_base_is_the_picture_that_diffusers_draws(built: Path, weights: Path, prompt: str) -> None:
    import torch

    row, preview = preview_of_the_base(built, prompt)
    texts = {each["text"]: each["caption_id"] for each in projects.content(built, "captions").to_pylist()}
    table = projects.content(built, "embeddings")
    stored = dict(zip(table["caption_id"].to_pylist(), floats(table), strict=True))
    with_prompt, without = (torch.tensor(windows([stored[texts[each]]])) for each in (row["prompt"], ""))
    noise = torch.tensor(np.array(sampling.noise(row["seed"], (1, 128, SIDE // 16, SIDE // 16))))
    pipe, beside = pipeline(weights), {}
    if prompt == EDIT:
        reference = read_reference(built / "images" / "control" / "picture1.png")
        latent = encode_image(TINY.architecture.load_autoencoder(weights / "vae", TINY), reference)
        beside["image_cond_latents"] = [torch.tensor(np.array(latent))]
    drawn = pipe(
        prompt_embeds=with_prompt,
        negative_prompt_embeds=without,
        latents=noise,
        height=SIDE,
        width=SIDE,
        num_inference_steps=STEPS,
        output_type="np",
        **beside,
    ).get("images")[0]
    assert np.abs(preview - 255 * drawn).max() <= 1.05


def test_an_adapter_of_blocks_for_references_draws_where_these_are_not_loaded(built: Path, weights: Path) -> None:
    trained = Project(built).current("train").folder / "artifacts" / "adapter.safetensors"
    config, text, drawn = SamplesConfig(precision="float32", steps=1), mx.ones((1, 80, 192)), []
    for beside in ((), (mx.zeros((1, 128, 2, 2)),)):
        adapters = Adapters("the adapter", files=lambda: [(trained, 1.0)])
        sampler = load_sampler(adapters, weights / "transformer", TINY, config, lambda: 0 * text, beside)
        assert any(block.kind == "reference" for block in sampler.model.blocks) == bool(beside)
        drawn.append(np.array(sampler.draw(text, 0, 64, 64)))
    np.testing.assert_array_equal(*drawn)


@pytest.mark.parametrize("distilled", [False, True], ids=["base", "distilled"])
@pytest.mark.parametrize("beside", [(), ((2, 3), (3, 3))], ids=["plain", "two references"])
def test_a_latent_drawn_from_equal_noise_is_that_of_diffusers(distilled: bool, beside: Any, weights: Path) -> None:
    import torch

    _, (text, empty), shown = given((4, 4), (80, 80), beside, 128, 192)
    shown = [each[:1] for each in shown]
    pipe = pipeline(weights, distilled)
    reference = random_reference(in_channels=128, cond_in_channels=128, joint_attention_dim=192, flow_map=distilled)
    pipe.update_components(transformer=reference)
    options = {"latents": torch.tensor(np.array(sampling.noise(3, (1, 128, 4, 4)))), "num_inference_steps": 4}
    options |= {} if distilled else {"negative_prompt_embeds": torch.tensor(empty[None])}
    options |= {"image_cond_latents": [torch.tensor(each) for each in shown]} if beside else {}
    drawn = pipe(prompt_embeds=torch.tensor(text[None]), height=64, width=64, output_type="np", **options)
    settings: dict[str, Any] = {"seed": 3, "steps": 4, "guidance": GUIDANCE, "references": [mx.array(each) for each in shown]}
    settings |= {} if distilled else {"negative_1TJ": mx.array(empty[None])}
    *_, got = TINY.architecture.draw(ours(reference, bool(beside)), mx.array(text[None]), 64, 64, **settings)
    expected = drawn.get("latents").numpy()
    assert np.abs(np.array(got) - expected).max() <= 1e-5 * np.abs(expected).max()


def test_an_exported_adapter_gives_our_velocity_in_diffusers(built: Path, weights: Path) -> None:
    import torch

    x_BChw, texts, shown = given((3, 4), (7,), ((2, 2),), 128, 192)
    sigma = np.array([0.6], np.float32)

    def velocity(pipe: Any) -> np.ndarray:
        with torch.no_grad():
            return np.array(theirs(pipe.transformer, x_BChw, texts, sigma, None, shown))

    def own(adapter: Path | None) -> np.ndarray:
        model = TINY.architecture.load_transformer(weights / "transformer", TINY, mx.float32)
        forward = model_forward(model, TINY.architecture.read_adapter(adapter) if adapter else None)
        return np.array(forward(**prepared(x_BChw, texts, sigma, sigma, shown)))

    assert_exports_agree(built, lambda: pipeline(weights), velocity, own)
