"""The whole chain on a small klein and a small dev that diffusers itself wrote, beside what diffusers computes."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from pipeline.commands.text_to_image.export import export_run
from pipeline.project.project import Project
from stages.models import sampling
from stages.models.flux2.architecture import FLUX2
from stages.models.flux2.load import load_flux2
from stages.models.flux2.transformer import image_ids, text_ids
from stages.models.text.encoder import widen
from stages.text_to_image.train.task import ImageTask
from stages.tuner.blockwise.backprop import model_forward
from stages.tuner.loop import load_training
from stages.tuner.step import TrainingStep
from tests import checkpoints, projects

GUIDANCE = 2.5  # of previews
ULP = 2.0**-7  # bfloat16 keeps 8 significant bits: two roundings of nearly equal numbers differ by at most one step


@pytest.fixture(scope="module", params=["klein", "dev"])
def reference(request, tmp_path_factory, tiny_weights):
    """diffusers' pipeline, the folder that its save_pretrained wrote, and the name of the family."""
    from diffusers import Flux2KleinPipeline

    pipe = Flux2KleinPipeline.from_pretrained(tiny_weights) if request.param == "klein" else checkpoints.dev_pipeline()
    pipe.set_progress_bar_config(disable=True)
    folder = tmp_path_factory.mktemp("reference") / "saved"
    pipe.save_pretrained(folder)
    return pipe, folder, "tiny" if request.param == "klein" else "dev"


@pytest.fixture(scope="module")
def project(tmp_path_factory, reference) -> Path:
    folder = projects.make(tmp_path_factory.mktemp("real") / "project", reference[1], images=0)
    projects.edit(folder, 'family = "tiny"', f'family = "{reference[2]}"')
    projects.edit(folder, "steps = 2\n", f"steps = 2\nguidance = {GUIDANCE}\n")
    projects.edit(folder, "steps = 6\n", "steps = 2\nlr = 0.1\n")
    chosen = [p for p in sorted((projects.MATERIAL / "images").iterdir()) if p.suffix in (".jpg", ".png")][::9]
    for path in chosen:
        shutil.copy(path, folder / "images" / path.name)
        (folder / "images" / path.name).with_suffix(".txt").write_text(f"a picture called {path.stem}")
    projects.build(folder)
    return folder


def floats(table: pa.Table) -> list[np.ndarray]:
    """The stored tensors as float32."""
    words = [np.frombuffer(w, np.uint16).astype(np.uint32) << 16 for w in table["bytes of tensor"].to_pylist()]
    return [w.view(np.float32).reshape(shape) for w, shape in zip(words, table["shape"].to_pylist(), strict=True)]


def preview_of_the_base(project: Path, prompt: str = "a red thing") -> tuple[dict[str, Any], np.ndarray]:
    """Return (its row, its pixels)."""
    rows = projects.content(project, "samples").to_pylist()
    row = next(row for row in rows if (row["step"], row["prompt"]) == (0, prompt))
    with Image.open(Project(project).current("samples").folder / "artifacts" / row["path"]) as image:
        pixels = np.asarray(image).astype(np.float32)
    assert pixels.std() > 5
    return row, pixels


def assert_gradients_are_those_of(theirs: dict[str, Any], made: TrainingStep, grads: dict[str, Any]) -> None:
    """`theirs`: weights of diffusers, with their gradients. B is 0 at the start, so the gradient of A is 0."""
    for name in (target.name for target in made.targets):
        a = np.array(made.adapter[f"{name}.lora_A.weight"])
        expected = theirs[f"{name}.weight"].grad.numpy() @ a.T
        assert np.linalg.norm(np.array(grads[f"{name}.lora_B.weight"]) - expected) <= 1e-4 * np.linalg.norm(expected), name
        assert not np.array(grads[f"{name}.lora_A.weight"]).any()


def mixed_batch(
    batch: Any, unfold: Callable[[np.ndarray], np.ndarray] = lambda x: x
) -> tuple[np.ndarray, list[np.ndarray], np.ndarray, np.ndarray]:
    """Return (the noisy latents, the texts without padding, the noise levels, the wanted velocity), as diffusers takes them."""
    x0, eps = (unfold(each) for each in (widen(batch.x0_BCHW), batch.noise_BCHW))
    sigma = np.array([s.sigma for s in batch.samples], np.float32)
    mixed = (1 - sigma)[:, None, None, None] * x0 + sigma[:, None, None, None] * eps
    rows = [batch.ctx_BTJ.shape[1]] * len(sigma) if batch.tokens_B is None else batch.tokens_B.tolist()
    return mixed, [widen(words[:count]) for words, count in zip(batch.ctx_BTJ, rows, strict=True)], sigma, eps - x0


def close(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=ULP, atol=1e-4)


def test_the_latents_table_holds_what_diffusers_encodes(project, reference):
    import torch

    from stages.text_to_image.imaging.decode import open_image

    pipe = reference[0]
    table = projects.content(project, "latents")
    paths = {row["image_id"]: row["path"] for row in projects.content(project, "images").to_pylist()}
    assert table.num_rows >= 4
    for row, ours in zip(table.to_pylist(), floats(table), strict=True):
        image = open_image(project / "images" / paths[row["image_id"]])
        box = (row["crop_x"], row["crop_y"], row["crop_x"] + row["crop_w"], row["crop_y"] + row["crop_h"])
        pixels = np.asarray(image.resize((row["width"], row["height"]), 1, box=box), np.float32) / 127.5 - 1
        with torch.no_grad():
            mode = pipe.vae.encode(torch.from_numpy(pixels).permute(2, 0, 1)[None]).latent_dist.mode()
            packed = pipe._patchify_latents(mode)
            mean = pipe.vae.bn.running_mean.view(1, -1, 1, 1)
            std = torch.sqrt(pipe.vae.bn.running_var.view(1, -1, 1, 1) + pipe.vae.config.batch_norm_eps)
            theirs = ((packed - mean) / std)[0].numpy()
        close(ours, theirs)


def test_the_embeddings_table_holds_what_diffusers_encodes(project, reference):
    import torch

    pipe = reference[0]
    family = Project(project).family
    texts = {row["caption_id"]: row["text"] for row in projects.content(project, "captions").to_pylist()}
    table = projects.content(project, "embeddings")
    assert "" in texts.values() and len(texts) == table.num_rows
    for row, ours in zip(table.to_pylist(), floats(table), strict=True):
        with torch.no_grad():
            theirs, _ = pipe.encode_prompt(
                texts[row["caption_id"]],
                device="cpu",
                max_sequence_length=family.text_tokens,
                text_encoder_out_layers=family.text_layers,
            )
        close(ours, theirs[0].float().numpy())


def test_the_losses_and_gradients_of_the_first_step_are_those_of_diffusers(project, reference):
    import torch

    opened = Project(project)
    task = ImageTask(opened.open("train"))
    (samples,) = task.draw(1)
    batch = task.reader().read(1, samples)
    made = load_training(task, None)
    grads = made.gradient([batch]).grads

    model = reference[0].transformer
    theirs = {name: value.requires_grad_() for name, value in model.named_parameters()}
    B, _, H, W = batch.x0_BCHW.shape
    mixed, texts, sigma, target = (torch.tensor(np.array(each)) for each in mixed_batch(batch))
    v = model(
        mixed.flatten(2).permute(0, 2, 1),
        encoder_hidden_states=texts,
        timestep=sigma,
        img_ids=torch.cartesian_prod(torch.arange(1), torch.arange(H), torch.arange(W), torch.arange(1)).float(),
        txt_ids=torch.cartesian_prod(*[torch.arange(1)] * 3, torch.arange(texts.shape[1])).float(),
        guidance=torch.ones(B) if opened.family.guidance_embedded else None,
        return_dict=False,
    )[0]
    losses = (v - target.flatten(2).permute(0, 2, 1)).pow(2).mean(dim=(1, 2))
    losses.mean().backward()
    rows = [row for row in projects.content(project, "train").to_pylist() if (row["step"], row["split"]) == (1, "train")]
    np.testing.assert_allclose([row["loss"] for row in rows], losses.detach().numpy(), rtol=1e-4)
    assert_gradients_are_those_of(theirs, made, grads)
    model.zero_grad(set_to_none=True)
    model.requires_grad_(False)


def test_a_preview_of_the_base_is_the_picture_that_diffusers_draws(project, reference):
    import torch

    pipe, _, name = reference
    row, ours = preview_of_the_base(project)
    family = Project(project).family
    options = {"device": "cpu", "max_sequence_length": family.text_tokens, "text_encoder_out_layers": family.text_layers}
    with torch.no_grad():
        with_prompt, without = (pipe.encode_prompt(text, **options)[0].bfloat16().float() for text in (row["prompt"], ""))
    given = {"negative_prompt_embeds": without} if family.real_cfg else {}
    theirs = pipe(
        prompt_embeds=with_prompt,
        latents=torch.tensor(np.array(sampling.noise(row["seed"], (1, 128, 4, 4)))),
        height=64,
        width=64,
        num_inference_steps=2,
        guidance_scale=GUIDANCE,
        output_type="np",
        **given,
    ).images[0]
    assert np.abs(ours - 255 * theirs).max() <= 1.05, name  # embeddings are stored in bfloat16


def assert_exports_agree(
    project: Path, load: Callable[[], Any], theirs: Callable[[Any], np.ndarray], ours: Callable[[Path | None], np.ndarray]
) -> None:
    """`load` gives diffusers' pipeline, `theirs` its velocity, `ours` that with the adapter of a file."""
    opened = Project(project)
    trained = opened.current("train").folder / "artifacts" / "adapter.safetensors"
    for style in ("diffusers", "comfyui"):
        file = export_run(opened, project / "out" / f"{style}.safetensors", style, dtype="float32", step=None)
        pipe = load()
        pipe.load_lora_weights(str(file))
        expected = theirs(pipe)
        for path in (trained, file):  # whatever the layout, it is read as the trained one is
            assert np.abs(ours(path) - expected).max() <= 2e-5, style
        assert np.abs(ours(None) - expected).max() > 2e-4, "the adapter changes nothing"


def test_the_exported_adapter_gives_our_velocity_in_diffusers(project, reference):
    import torch

    opened = Project(project)
    generator = np.random.default_rng(0)
    text_width = reference[0].transformer.config.joint_attention_dim
    x_1LC, ctx_1TJ = (generator.standard_normal(shape, np.float32) for shape in ((1, 12, 128), (1, 7, text_width)))
    x_ids, ctx_ids = image_ids(3, 4), text_ids(7)

    def theirs(pipe: Any) -> np.ndarray:
        with torch.no_grad():
            found: np.ndarray = pipe.transformer(
                hidden_states=torch.tensor(x_1LC),
                encoder_hidden_states=torch.tensor(ctx_1TJ),
                timestep=torch.tensor([0.6]),
                img_ids=torch.tensor(x_ids)[None],
                txt_ids=torch.tensor(ctx_ids)[None],
                guidance=torch.tensor([GUIDANCE]),
                return_dict=False,
            )[0].numpy()
        return found

    def ours(adapter: Path | None) -> np.ndarray:
        model = load_flux2(opened.component("transformer"), opened.family, mx.float32)
        forward = model_forward(model, FLUX2.read_adapter(adapter) if adapter else None)
        levels = {"timesteps_B": mx.array([0.6]), "guidance_B": mx.array([GUIDANCE])}
        return np.array(forward(x_BLC=mx.array(x_1LC), x_ids_L4=x_ids, ctx_BTJ=mx.array(ctx_1TJ), ctx_ids_T4=ctx_ids, **levels))

    load = functools.partial(type(reference[0]).from_pretrained, reference[1])
    assert_exports_agree(project, load, theirs, ours)
