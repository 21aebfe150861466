"""Edit training: what the model sees beside the noisy latent, and a step with references against torch's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from schemas.text_to_image import IMAGES
from stages.text_to_image.families import family
from stages.text_to_image.train.config import DataConfig
from stages.text_to_image.train.memory import ImageEstimator, largest_batch
from stages.text_to_image.train.profile import random_batch
from stages.text_to_image.train.task import family_of
from stages.tuner.step import TrainingStep
from tests.harness import rows_of
from tests.stages.text_to_image.train.runs import BASE, TEXT_ROWS, TINY, Run, tables, weights
from tests.stages.text_to_image.train.test_step import step_of

SIZE = (96, 64)


def paired() -> dict[str, Any]:
    """Tables of images with two references each, one of their own size and a smaller one."""
    targets = 4
    made = tables(tuple(size for size in (SIZE, SIZE, (64, 32)) for _ in range(targets)))
    rows = made["images"].to_pylist()
    for n, row in enumerate(rows[targets:]):
        row |= {"use": "reference", "reference_of": f"image{n % targets}", "reference": n // targets + 1}
    made["images"] = rows_of(IMAGES, *rows)
    return made


def reference_of(folder: Path, made: TrainingStep) -> Any:
    """The transformer of diffusers with the adapter in peft, of rank 3 and alpha 1.5."""
    import torch
    from diffusers import Flux2Transformer2DModel
    from peft import LoraConfig

    reference = Flux2Transformer2DModel.from_pretrained(folder)
    names = [target.name for target in made.targets]
    reference.add_adapter(LoraConfig(r=3, lora_alpha=1.5, target_modules=names, init_lora_weights=False))
    with torch.no_grad():
        for name, value in reference.named_parameters():
            if "lora_" in name:
                value.copy_(torch.tensor(np.array(made.adapter[name.replace(".default", "")])))
    return reference


def plain(words: np.ndarray) -> np.ndarray:
    """bfloat16 words as float32."""
    return (words.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("guidance", [False, True])
def test_losses_and_every_gradient_of_a_step_with_references_equal_torchs_with_peft(guidance: bool, tmp_path: Path) -> None:
    import torch
    from diffusers import Flux2KleinPipeline

    folder = weights(tmp_path / "transformer", guidance=guidance)
    run = Run(tmp_path, folder, replace(BASE, batch_size=3, rank=3, alpha=1.5), paired())
    made, (batch,) = step_of(run)
    assert [each.shape for each in batch.references] == [(3, 128, 4, 6), (3, 128, 2, 4)]
    reference = reference_of(folder, made)
    x0, eps = torch.tensor(plain(batch.x0_BCHW)), torch.tensor(batch.noise_BCHW)
    sigma = torch.tensor([s.sigma for s in batch.samples])[:, None, None, None]
    beside = [torch.tensor(plain(each)) for each in batch.references]
    pack, ids = Flux2KleinPipeline._pack_latents, Flux2KleinPipeline._prepare_latent_ids(x0)
    given = torch.cat([pack((1 - sigma) * x0 + sigma * eps), *(pack(each) for each in beside)], dim=1)
    at = Flux2KleinPipeline._prepare_image_ids([each[:1] for each in beside]).expand(len(x0), -1, -1)
    prediction = reference(
        given,
        encoder_hidden_states=torch.tensor(plain(batch.ctx_BTJ)),
        timestep=sigma.flatten(),
        img_ids=torch.cat([ids, at], dim=1),
        txt_ids=torch.cartesian_prod(*[torch.arange(1)] * 3, torch.arange(TEXT_ROWS)).float(),
        guidance=torch.ones(len(x0)) if guidance else None,
        return_dict=False,
    )[0][:, : ids.shape[1]]
    losses_B = (prediction - pack(eps - x0)).pow(2).mean(dim=(1, 2))
    losses_B.mean().backward()
    found = made.gradient([batch])
    theirs = {name.replace(".default", ""): value.grad for name, value in reference.named_parameters() if "lora_" in name}
    np.testing.assert_allclose(np.array(found.losses), losses_B.detach().numpy(), rtol=1e-5)
    assert theirs.keys() == found.grads.keys()
    for name, torchs in theirs.items():
        assert np.linalg.norm(np.array(found.grads[name]) - torchs.numpy()) <= 1e-4 * np.linalg.norm(torchs), name


def test_every_sample_is_read_with_the_references_of_its_own_image(wide: Path, tmp_path: Path) -> None:
    run = Run(tmp_path, wide, replace(BASE, batch_size=2), paired())
    words = {row["latent_id"]: row for row in run.tables["latents"].to_pylist()}
    for batch in (each for step in (1, 2, 3) for each in run.micro_batches(step)):
        for at, sample in enumerate(batch.samples):
            number = int(sample.crop.image_id.removeprefix("image"))
            for latents, latent_id in zip(batch.references, (f"latent{4 + number}", f"latent{8 + number}"), strict=True):
                assert latents[at].ravel().tolist() == words[latent_id]["tensor"]


def test_the_share_of_batches_without_references_is_the_dropout(wide: Path, tmp_path: Path) -> None:
    run = Run(tmp_path, wide, replace(BASE, data=DataConfig(reference_dropout=0.3)), paired())
    task = run.task()
    batches = [batch for step in range(1, 401) for batch in task.draw(step)]
    assert all(len({len(sample.crop.references) for sample in batch}) == 1 for batch in batches)
    assert 0.25 < np.mean([not batch[0].crop.references for batch in batches]) < 0.35


def test_the_estimate_of_memory_counts_the_references_and_a_batch_to_measure_with_has_them(wide: Path, tmp_path: Path) -> None:
    batch = largest_batch(Run(tmp_path, wide, BASE, paired()).task().sampler, 16)
    sizes = TINY.architecture.transformer_config(wide, TINY)
    assert batch.references == ((4, 6), (2, 4)) and batch.tokens == 24 + 24 + 8 + TEXT_ROWS
    estimates = (ImageEstimator(BASE, TINY.architecture, sizes, each) for each in (batch, replace(batch, references=())))
    shown, alone = (each.best(10**12) for each in estimates)
    assert shown.peak > alone.peak and sum(shown.blocks.traffic) > sum(alone.blocks.traffic)
    drawn = random_batch(TINY, batch)
    assert [each.shape[2:] for each in drawn.references] == [*batch.references] and drawn.tokens == batch.tokens


def test_a_family_that_reads_no_references_is_refused_and_blocks_of_their_own_are_left_out_where_there_are_none() -> None:
    made: Any = (SimpleNamespace(crops=(SimpleNamespace(references=each),), held=()) for each in (("a.png",), ()))
    shown, alone = made
    with pytest.raises(ValueError, match="z-image reads no reference images: take them away, or choose another family"):
        family_of(family("z-image"), shown)
    flux3 = family("flux3-klein-base")
    assert family_of(flux3, shown) == flux3 and family_of(flux3, alone) == replace(flux3, references="none")
    assert family_of(TINY, shown) == family_of(TINY, alone) == TINY
