"""The train stage on tiny random weights: what it draws and computes, and that it ends the same however it gets there."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pyarrow as pa
import pytest

from schemas.text_to_image import latents
from stages.text_to_image.train.config import NoiseConfig, TrainConfig
from stages.text_to_image.train.reader import MicroBatch
from stages.text_to_image.train.selection import ValidationConfig
from stages.text_to_image.train.stage import STAGE
from stages.text_to_image.train.task import ImageTask
from stages.tuner import checkpoint
from stages.tuner import step as tuner_step
from stages.tuner.adapters import lora
from stages.tuner.adapters.stacks import Stacks
from stages.tuner.config import EmaConfig, OptimizerConfig, ScheduleConfig
from stages.tuner.optimizers import step as optimizer_step
from tests import harness
from tests.stages.text_to_image.train.runs import BASE, SHAPES, TEXT_ROWS, TINY, Run, rows_of, tables, weights
from tests.stages.tuner.blockwise.test_backprop import assert_same


@pytest.fixture(scope="module")
def whole(transformer: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An unbroken run of BASE with accumulation."""
    return Run(tmp_path_factory.mktemp("whole"), transformer, replace(BASE, accumulate=2)).go()


# Resuming


@pytest.mark.parametrize("seed", range(4))
def test_a_run_that_is_stopped_and_killed_ends_with_the_bits_of_an_unbroken_one(seed, whole, transformer, tmp_path):
    draw = random.Random(seed)
    run = Run(tmp_path, transformer, whole.config)
    for _ in range(3):
        at = draw.randint(1, 6)
        run.go(**({"stop_at": at} if draw.random() < 0.5 else {"kill_at": at, "lose": draw.randint(0, 4)}))
    run.go()
    assert run.rows == whole.rows
    assert run.adapter == whole.adapter
    final = "checkpoints/step-000007/optimizer.safetensors"
    assert (run.folder / "artifacts" / final).read_bytes() == (whole.folder / "artifacts" / final).read_bytes()


def test_a_stop_writes_a_checkpoint_of_its_step_and_the_next_run_goes_on_from_it(whole, transformer, tmp_path):
    run = Run(tmp_path, transformer, whole.config).go(stop_at=2)
    assert max(step for step, _, _ in run.stored) == 2
    assert [saved.step for saved in checkpoint.find_checkpoints(tmp_path / "artifacts")] == [2]
    first = run.go(kill_at=3).said[-2]
    assert first.endswith("steps 3 to 7")


def test_a_damaged_checkpoint_is_passed_over(whole, transformer, tmp_path):
    run = Run(tmp_path, transformer, whole.config).go(kill_at=6)
    file = tmp_path / "artifacts" / "checkpoints" / "step-000006" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    run.go()
    assert run.said[-2].endswith("steps 4 to 7")
    assert (run.rows, run.adapter) == (whole.rows, whole.adapter)


def test_rows_that_a_kill_lost_are_yielded_again_without_training(whole, transformer, tmp_path):
    run = Run(tmp_path, transformer, whole.config).go()
    run.loaded = 0
    for key in [key for key in run.stored if key[0] >= 5]:
        del run.stored[key]
    run.go()
    assert run.loaded == 0
    assert run.rows == whole.rows


def test_rows_that_neither_table_nor_checkpoint_holds_are_trained_again(whole, transformer, tmp_path):
    run = Run(tmp_path, transformer, whole.config).go()
    (tmp_path / "artifacts" / "checkpoints" / "step-000003" / "rows.arrow").unlink()
    for key in [key for key in run.stored if key[0] == 2]:
        del run.stored[key]
    run.go()
    assert run.said[-2].endswith("steps 1 to 7")
    assert (run.rows, run.adapter) == (whole.rows, whole.adapter)


def test_a_finished_run_loads_nothing_and_writes_nothing(whole):
    before = {path: path.stat().st_mtime_ns for path in whole.folder.rglob("*")}
    whole.loaded = 0
    assert harness.run(STAGE, whole.context()).num_rows == 0
    assert whole.loaded == 0
    assert before == {path: path.stat().st_mtime_ns for path in whole.folder.rglob("*")}


def test_a_finished_run_is_made_longer_and_equals_one_that_was_long_from_the_start(whole, transformer, tmp_path):
    run = Run(tmp_path, transformer, replace(whole.config, steps=4)).go()
    assert run.adapter == (run.folder / "artifacts/checkpoints/step-000004/adapter.safetensors").read_bytes()
    run.config = whole.config
    run.go()
    assert run.said[-2].endswith("steps 5 to 7")
    assert (run.rows, run.adapter) == (whole.rows, whole.adapter)


def test_a_run_made_shorter_has_the_adapter_of_the_shorter_run(whole, transformer, tmp_path):
    run = Run(tmp_path / "a", transformer, whole.config).go()
    run.config = replace(whole.config, steps=6)
    run.go()
    assert run.adapter == Run(tmp_path / "b", transformer, run.config).go().adapter
    run.config = whole.config
    run.loaded = 0
    run.go()
    assert run.loaded == 0
    assert run.adapter == whole.adapter


def test_a_run_made_as_short_as_one_of_its_checkpoints_takes_its_adapter_and_loads_nothing(whole, transformer, tmp_path):
    run = Run(tmp_path / "a", transformer, replace(whole.config, keep_states=1)).go()
    run.config, run.loaded = replace(run.config, steps=3), 0
    run.go()
    assert run.loaded == 0
    assert run.adapter == Run(tmp_path / "b", transformer, run.config).go().adapter


@pytest.mark.parametrize("name", ["adapter.safetensors", "adapter_ema.safetensors", "adapter_best.safetensors"])
@pytest.mark.parametrize("left", [0, 100])
def test_a_result_that_was_deleted_or_cut_comes_back_from_its_checkpoint(transformer, tmp_path, name, left):
    config = replace(BASE, steps=3, ema=EmaConfig(), validation=ValidationConfig(every=2))
    run = Run(tmp_path, transformer, config).go()
    path = tmp_path / "artifacts" / name
    before = path.read_bytes()
    path.write_bytes(before[:-left]) if left else path.unlink()
    run.loaded = 0
    run.go()
    assert path.read_bytes() == before
    assert run.loaded == 0


def test_a_damaged_checkpoint_is_reported_and_the_run_goes_on_from_the_one_before_it(whole, transformer, tmp_path):
    run = Run(tmp_path, transformer, whole.config).go(stop_at=5)
    newest = max((tmp_path / "artifacts/checkpoints").iterdir()) / "adapter.safetensors"
    newest.write_bytes(newest.read_bytes()[:-4])
    run.go()
    assert "the checkpoint of step 5 is damaged; the run goes on from step 3" in run.said
    assert (run.rows, run.adapter) == (whole.rows, whole.adapter)


def test_a_run_whose_checkpoints_are_gone_says_that_it_begins_again(whole, transformer, tmp_path):
    run = Run(tmp_path, transformer, whole.config).go(stop_at=5)
    shutil.rmtree(tmp_path / "artifacts" / "checkpoints")
    run.go()
    assert any(line.startswith("no checkpoint is left") for line in run.said)
    assert (run.rows, run.adapter) == (whole.rows, whole.adapter)


def test_the_interval_of_checkpoints_changes_no_result(whole, transformer, tmp_path):
    run = Run(tmp_path, transformer, replace(whole.config, checkpoint_every=1, keep_states=1)).go()
    assert (run.rows, run.adapter) == (whole.rows, whole.adapter)
    states = sorted(path.parent.name for path in tmp_path.rglob("optimizer.safetensors"))
    assert states == ["step-000007"]
    assert len(list(tmp_path.rglob("checkpoints/*/adapter.safetensors"))) == 7


# What is drawn


def test_the_order_of_the_tables_rows_does_not_matter(whole, transformer, tmp_path):
    flipped = {name: table.take(list(range(table.num_rows))[::-1]) for name, table in tables().items()}
    run = Run(tmp_path, transformer, whole.config, flipped).go()
    assert (run.rows, run.adapter) == (whole.rows, whole.adapter)
    assert STAGE.snapshot(run.context()).equals(STAGE.snapshot(whole.context()))


def test_there_is_a_row_for_every_wanted_sample_with_everything_that_was_drawn(whole):
    wanted = STAGE.wants(whole.context()).to_pylist()
    assert [(row["step"], row["sample"]) for row in wanted] == [(row["step"], row["sample"]) for row in whole.rows]
    assert {row["epoch"] for row in whole.rows} == {0, 1, 2}
    assert [row["image_id"] for row in whole.rows if row["epoch"] == 0] != [
        row["image_id"] for row in whole.rows if row["epoch"] == 1
    ]
    for epoch in (0, 1):
        assert sorted(row["image_id"] for row in whole.rows if row["epoch"] == epoch) == [f"image{n}" for n in range(len(SHAPES))]
    for row in whole.rows:
        number = row["image_id"].removeprefix("image")
        assert row["latent_id"] == f"latent{number}"
        assert row["caption_id"] in (("nothing",) if row["dropped"] else (f"text{number}", f"other{number}"))
        assert (row["width"], row["height"]) == SHAPES[int(number)]
        assert row["tokens"] == row["width"] * row["height"] // 256 + TEXT_ROWS
        assert 0 < row["sigma"] < 1
        assert 0 < row["loss"] < 20
    assert {row["dropped"] for row in whole.rows} == {True, False}
    assert {row["caption_id"][:4] for row in whole.rows} == {"text", "othe", "noth"}
    for _, row in sorted(whole.stored.items()):
        assert row["seconds"] > row["read_seconds"] >= 0
        assert row["peak_bytes"] > 0


def test_the_samples_of_a_step_draw_different_noise_levels_and_dropouts(transformer, tmp_path):
    config = replace(BASE, batch_size=7, steps=40, caption_dropout=0.5)
    sampler = Run(tmp_path, transformer, config, tables(((64, 64),) * 7)).task().sampler
    steps = [batch for step in range(1, 41) for batch in sampler.step(step)]
    assert all(len({sample.sigma for sample in samples}) == 7 for samples in steps)
    assert len({tuple(sample.dropped for sample in samples) for samples in steps}) > 20
    assert 0.4 < np.mean([sample.dropped for samples in steps for sample in samples]) < 0.6


def test_batches_of_unequal_size_count_by_their_samples(transformer, tmp_path):
    run = Run(tmp_path, transformer, replace(BASE, batch_size=3, accumulate=2, steps=1), tables(((64, 64),) * 4))
    made = run.training()
    made.masters = Stacks.of(
        {name: value + 0.1 * mx.random.normal(value.shape, key=mx.random.key(1)) for name, value in made.adapter.items()}
    )
    batches = run.micro_batches(1)
    assert sorted(len(batch.samples) for batch in batches) == [1, 3]
    fields = ("x0_BCHW", "noise_BCHW", "ctx_BTJ")
    joint = MicroBatch(
        [s for m in batches for s in m.samples], *(np.concatenate([getattr(m, name) for m in batches]) for name in fields)
    )
    several, one = made.gradient(batches), made.gradient([joint])
    np.testing.assert_allclose(np.array(several.losses), np.array(one.losses), rtol=1e-5)
    assert_same(several.grads, one.grads, 1e-5)  # 2e-6 was seen; see SPLIT in test_features.py


def test_one_step_alone_gives_its_logged_losses(whole):
    saved = next(s for s in checkpoint.find_checkpoints(whole.folder / "artifacts") if s.step == 6)
    found = whole.training(saved).gradient(whole.micro_batches(7))
    assert found.losses.tolist() == [row["loss"] for row in whole.rows if row["step"] == 7]


def test_rows_that_cannot_be_used_are_left_out(tmp_path, transformer):
    made = tables()
    made["buckets"] = replace_row(made["buckets"], 0, rejected="too_small")
    made["latents"] = replace_row(made["latents"], 1, rejected="truncated", shape=[], tensor=[])
    made["images"] = replace_row(made["images"], 2, rejected="duplicate")
    made["captions"] = made["captions"].filter(pa.compute.not_equal(made["captions"]["image_id"], "image3"))
    other = rows_of(latents.LATENTS, {"latent_id": "old crop", "image_id": "image4", "width": 96, "height": 64, "shape": [1]})
    made["latents"] = pa.concat_tables([made["latents"], other])
    data = Run(tmp_path, transformer, tables=made).task().data
    assert [crop.latent_id for crop in data.crops] == ["latent4", "latent5", "latent6"]


def replace_row(table: pa.Table, at: int, **values: Any) -> pa.Table:
    rows = table.to_pylist()
    rows[at] |= values
    return pa.Table.from_pylist(rows, schema=table.schema)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {"buckets": t["buckets"].slice(0, 0)}, "nothing to train on: of 0 crops"),
        (
            lambda t: t | {"captions": t["captions"].slice(10)},
            "nothing to train on: of 7 crops 0 could not be encoded and 7 have no",
        ),
        (lambda t: t | {"captions": t["captions"].slice(0, 9)}, "caption_dropout needs the empty caption"),
        (lambda t: t | {"latents": t["latents"].slice(2)}, "2 of 7 crops have no latent; run the stage latents"),
        (lambda t: t | {"embeddings": t["embeddings"].slice(2)}, "2 of 11 captions have no embedding; run the stage embeddings"),
    ],
)
def test_missing_rows_are_an_error_of_one_line(change, message, tmp_path, transformer):
    made = change(tables())
    if "7 crops 0" in message:
        made["captions"] = pa.concat_tables([made["captions"], tables()["captions"].slice(10, 1)])
    with pytest.raises(ValueError, match=message) as caught:
        Run(tmp_path, transformer, tables=made).context()
    assert "\n" not in str(caught.value)


# What is computed


@pytest.mark.parametrize("guidance", [False, True])
def test_losses_and_every_gradient_of_a_step_equal_torchs_with_peft(guidance, tmp_path):
    import torch
    from diffusers import Flux2Transformer2DModel
    from peft import LoraConfig

    folder = weights(tmp_path / "transformer", guidance=guidance)
    run = Run(tmp_path, folder, replace(BASE, batch_size=3, rank=3, alpha=1.5))
    made = run.training()
    draw = np.random.default_rng(5)
    made.masters = Stacks.of(
        {name: mx.array(draw.normal(0, 0.1, value.shape).astype(np.float32)) for name, value in made.adapter.items()}
    )
    (batch,) = run.micro_batches()
    gradient = made.gradient([batch])
    losses, grads = gradient.losses, gradient.grads

    reference = Flux2Transformer2DModel.from_pretrained(folder)
    names = [target.name for target in made.targets]
    reference.add_adapter(LoraConfig(r=3, lora_alpha=1.5, target_modules=names, init_lora_weights=False))
    theirs = {name: value for name, value in reference.named_parameters() if "lora_" in name}
    assert len(theirs) == len(grads) == 2 * len(names)
    with torch.no_grad():
        for name, value in theirs.items():
            value.copy_(torch.tensor(np.array(made.adapter[name.replace(".default", "")])))
    B, C, H, W = batch.x0_BCHW.shape
    x0, eps = torch.tensor(plain(batch.x0_BCHW)), torch.tensor(batch.noise_BCHW)
    sigma = torch.tensor([s.sigma for s in batch.samples])[:, None, None, None]
    x = ((1 - sigma) * x0 + sigma * eps).reshape(B, C, H * W).permute(0, 2, 1)
    prediction = reference(
        x,
        encoder_hidden_states=torch.tensor(plain(batch.ctx_BTJ)),
        timestep=sigma.flatten(),
        img_ids=torch.cartesian_prod(torch.arange(1), torch.arange(H), torch.arange(W), torch.arange(1)).float(),
        txt_ids=torch.cartesian_prod(*[torch.arange(1)] * 3, torch.arange(TEXT_ROWS)).float(),
        guidance=torch.ones(B) if guidance else None,
        return_dict=False,
    )[0]
    target = (eps - x0).reshape(B, C, H * W).permute(0, 2, 1)
    expected = (prediction - target).pow(2).mean(dim=(1, 2))
    expected.mean().backward()

    np.testing.assert_allclose(np.array(losses), expected.detach().numpy(), rtol=1e-5)
    for name, value in theirs.items():
        ours, torchs = np.array(grads[name.replace(".default", "")]), value.grad.numpy()
        assert np.linalg.norm(ours - torchs) <= 1e-4 * np.linalg.norm(torchs), name


def plain(words: np.ndarray) -> np.ndarray:
    """bfloat16 words as float32."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def test_training_lowers_the_loss(transformer, tmp_path):
    config = replace(
        BASE,
        steps=60,
        rank=4,
        batch_size=1,
        caption_dropout=0.0,
        schedule=ScheduleConfig(warmup_steps=5),
        noise=NoiseConfig("uniform"),
    )
    run = Run(tmp_path, transformer, config, tables(((64, 64),))).go()
    losses = [row["loss"] for row in run.rows]
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])


def test_the_masters_stay_float32_under_bfloat16(transformer, tmp_path):
    run = Run(tmp_path, transformer, replace(BASE, steps=2, precision="bfloat16")).go()
    arrays = mx.load(str(tmp_path / "artifacts" / "adapter.safetensors"))
    assert {value.dtype for value in arrays.values()} == {mx.float32}
    assert any("bfloat16 is slow on a CPU" in line for line in run.said) == (mx.default_device() == mx.cpu)
    assert all(np.isfinite(row["loss"]) for row in run.rows)


def test_the_header_of_the_adapter_describes_it(whole):
    metadata = mx.load(str(whole.folder / "artifacts" / "adapter.safetensors"), return_metadata=True)[1]
    assert metadata == {"family": "tiny", "variant": "lora", "rank": "2", "alpha": "2", "step": "7"}


def test_targets_choose_what_is_trained(transformer, tmp_path):
    Run(tmp_path, transformer, replace(BASE, steps=1, targets=("attn.to_q", "single_transformer_blocks.*"))).go()
    names = {
        name.removesuffix(lora.A).removesuffix(lora.B) for name in mx.load(str(tmp_path / "artifacts" / "adapter.safetensors"))
    }
    single = "single_transformer_blocks.0.attn."
    assert names == {"transformer_blocks.0.attn.to_q", single + "to_out", single + "to_qkv_mlp_proj"}


# Runs that cannot go on


def broken(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Make the losses and gradients of these calls not a number."""
    calls = iter(range(1, 1000))
    real = tuner_step.loss_and_grads

    def compute(*given: Any) -> Any:
        losses, grads = real(*given)
        factor = float("nan") if next(calls) in steps else 1.0
        return losses * factor, {name: grad * factor for name, grad in grads.items()}

    monkeypatch.setattr(tuner_step, "loss_and_grads", compute)


def test_a_step_that_is_not_finite_is_skipped_and_reported(transformer, tmp_path, monkeypatch):
    broken(monkeypatch, 2, 3)
    run = Run(tmp_path, transformer, replace(BASE, steps=4, checkpoint_every=1)).go()
    saved = {found.step: found.arrays(checkpoint.ADAPTER) for found in checkpoint.find_checkpoints(tmp_path / "artifacts")}
    for name in saved[1]:
        assert mx.array_equal(saved[1][name], saved[3][name])
    assert any(not mx.array_equal(saved[3][name], saved[4][name]) for name in saved[3])
    assert checkpoint.find_checkpoints(tmp_path / "artifacts")[0].arrays(checkpoint.OPTIMIZER)["step"].item() == 2
    assert [line for line in run.said if "not finite" in line] == [
        f"step {step}: the loss or the gradient is not finite; the step is skipped" for step in (2, 3)
    ]


def test_three_steps_in_a_row_that_are_not_finite_end_the_run_also_across_a_resume(transformer, tmp_path, monkeypatch):
    broken(monkeypatch, 2, 3, 4)
    run = Run(tmp_path, transformer, replace(BASE, checkpoint_every=1)).go(stop_at=3)
    with pytest.raises(ValueError, match=r"^train: stopped at step 4: 3 steps in a row .* lower \[train\] lr \(0.01\)") as caught:
        run.go()
    assert "\n" not in str(caught.value)
    assert checkpoint.find_checkpoints(tmp_path / "artifacts")[0].step == 3


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "adafactor", "lion", "prodigy"])
def test_an_update_that_is_not_finite_ends_the_run_at_once_and_reaches_no_file(kind, transformer, tmp_path):
    method, schedule = OptimizerConfig(kind=kind), ScheduleConfig(warmup_steps=0)
    sound = replace(BASE, optimizer=method, schedule=schedule, lr=0.01, steps=3, checkpoint_every=1, ema=EmaConfig())
    run = Run(tmp_path, transformer, sound).go(stop_at=2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    run.config = replace(sound, lr=1e30)  # its third step, the last, would be the result
    with pytest.raises(ValueError) as caught:
        run.go()
    said = "train: stopped at step 3: the update made the adapter infinite, so it is not saved; lower [train] lr (1e+30)"
    assert str(caught.value) == said
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_an_adapter_that_does_not_move_ends_the_run(transformer, tmp_path, monkeypatch):
    monkeypatch.setattr(optimizer_step, "clip_factor", lambda norm, limit: mx.zeros(()))
    with pytest.raises(ValueError, match="stopped at step 10: the adapter has not moved"):
        Run(tmp_path, transformer, replace(BASE, steps=12, batch_size=1)).go()


def test_a_distilled_family_is_trained_with_a_warning(transformer, tmp_path):
    run = Run(tmp_path, transformer)
    context = run.context()
    context.need = {"family": replace(TINY, distilled=True)}.__getitem__
    assert [line for line in ImageTask(context).warnings() if "base model" in line]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "steps must be >= 1 and <= 1000000, got 0"),
        ({"caption_dropout": 1.5}, "caption_dropout must be >= 0 and <= 1, got 1.5"),
        ({"alpha": 0.0}, "alpha must be >= 1e-12, got 0.0"),
        ({"lr": -1e-4}, "lr must be >= 1e-12, got -0.0001"),
    ],
)
def test_an_error_about_a_setting_out_of_range_names_it(values, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**values)
