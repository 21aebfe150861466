"""The whole chain on a small klein and a small dev that diffusers itself wrote, beside what diffusers computes."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.project.project import Project
from stages.models.text.encoder import widen
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

    from stages.text_to_image.train.task import ImageTask
    from stages.tuner.loop import load_training

    opened = Project(project)
    task = ImageTask(opened.open("train"))
    (samples,) = task.draw(1)
    batch = task.reader().read(1, samples)
    made = load_training(task, None)
    grads = made.gradient([batch]).grads

    model = reference[0].transformer
    theirs = {name: value.requires_grad_() for name, value in model.named_parameters()}
    B, _, H, W = batch.x0_BCHW.shape
    x0, eps = torch.tensor(widen(batch.x0_BCHW)), torch.tensor(batch.noise_BCHW)
    sigma = torch.tensor([s.sigma for s in batch.samples])[:, None, None, None]
    text = torch.tensor(widen(batch.ctx_BTJ))
    v = model(
        ((1 - sigma) * x0 + sigma * eps).flatten(2).permute(0, 2, 1),
        encoder_hidden_states=text,
        timestep=sigma.flatten(),
        img_ids=torch.cartesian_prod(torch.arange(1), torch.arange(H), torch.arange(W), torch.arange(1)).float(),
        txt_ids=torch.cartesian_prod(*[torch.arange(1)] * 3, torch.arange(text.shape[1])).float(),
        guidance=torch.ones(B) if opened.family.guidance_embedded else None,
        return_dict=False,
    )[0]
    losses = (v - (eps - x0).flatten(2).permute(0, 2, 1)).pow(2).mean(dim=(1, 2))
    losses.mean().backward()
    rows = [row for row in projects.content(project, "train").to_pylist() if (row["step"], row["split"]) == (1, "train")]
    np.testing.assert_allclose([row["loss"] for row in rows], losses.detach().numpy(), rtol=1e-4)
    for name in (target.name for target in made.targets):  # B is 0 at the start, so the gradient of A is 0
        a = torch.tensor(np.array(made.adapter[f"{name}.lora_A.weight"]))
        expected = (theirs[f"{name}.weight"].grad @ a.T).numpy()
        ours = np.array(grads[f"{name}.lora_B.weight"])
        assert np.linalg.norm(ours - expected) <= 1e-4 * np.linalg.norm(expected), name
        assert not np.array(grads[f"{name}.lora_A.weight"]).any()
    model.zero_grad(set_to_none=True)
    model.requires_grad_(False)


def test_a_preview_of_the_base_is_the_picture_that_diffusers_draws(project, reference):
    import torch
    from PIL import Image

    from stages.models import sampling

    pipe, _, name = reference
    row = next(row for row in projects.content(project, "samples").to_pylist() if row["step"] == 0)
    with Image.open(Project(project).current("samples").folder / "artifacts" / row["path"]) as image:
        ours = np.asarray(image).astype(np.float32)
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
    assert ours.std() > 5


@pytest.mark.parametrize("style", ["diffusers", "comfyui"])
def test_the_exported_adapter_gives_our_velocity_in_diffusers(project, reference, tmp_path, style):
    import mlx.core as mx
    import torch

    from pipeline.commands.text_to_image.export import export_run
    from stages.models.flux2.architecture import FLUX2
    from stages.models.flux2.load import load_flux2
    from stages.models.flux2.transformer import image_ids, text_ids
    from stages.tuner.adapters import lora

    opened = Project(project)
    file = export_run(opened, tmp_path / "lora.safetensors", style, dtype="float32", step=None)
    pipe = type(reference[0]).from_pretrained(reference[1])
    bare = {name: value.clone() for name, value in pipe.transformer.state_dict().items()}
    pipe.load_lora_weights(str(file))
    assert len(pipe.transformer.state_dict()) > len(bare)

    model = load_flux2(opened.component("transformer"), opened.family, mx.float32)
    adapters, scales = FLUX2.read_adapter(opened.current("train").folder / "artifacts" / "adapter.safetensors")

    def adapted(block: str):
        inside = {name.removeprefix(f"{block}."): value for name, value in adapters.items() if name.startswith(f"{block}.")}
        return lora.AdaptedLinear(
            inside, {n.removeprefix(f"{block}."): s for n, s in scales.items() if n.startswith(f"{block}.")}
        )

    generator = np.random.default_rng(0)
    x_1LC, ctx_1TJ = generator.standard_normal((1, 12, 128)), generator.standard_normal((1, 7, model.config.joint_attention_dim))
    x_ids, ctx_ids = image_ids(3, 4), text_ids(7)
    ours = model(
        mx.array(x_1LC.astype(np.float32)),
        x_ids,
        mx.array(ctx_1TJ.astype(np.float32)),
        ctx_ids,
        mx.array([0.6]),
        mx.array([GUIDANCE]),
        linear_for=adapted,
    )
    with torch.no_grad():
        theirs = pipe.transformer(
            hidden_states=torch.tensor(x_1LC, dtype=torch.float32),
            encoder_hidden_states=torch.tensor(ctx_1TJ, dtype=torch.float32),
            timestep=torch.tensor([0.6]),
            img_ids=torch.tensor(np.array(x_ids))[None],
            txt_ids=torch.tensor(np.array(ctx_ids))[None],
            guidance=torch.tensor([GUIDANCE]),
            return_dict=False,
        )[0]
    np.testing.assert_allclose(np.array(ours), theirs.numpy(), atol=2e-5)
    merged = np.abs(np.array(model(mx.array(x_1LC.astype(np.float32)), x_ids, mx.array(ctx_1TJ.astype(np.float32)), ctx_ids,
                                   mx.array([0.6]), mx.array([GUIDANCE]))) - np.array(ours)).max()  # fmt: skip
    assert merged > 1e-6, "the adapter changes nothing, so this test would pass without it"
