"""Every feature of training, on tiny random weights: that it does what it says, and that a run with it ends the same however."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pyarrow as pa
import pytest

from schemas.text_to_image import captions, embeddings, latents
from stages.text_to_image.train.config import LossConfig, NoiseConfig, PreservationConfig, TrainConfig
from stages.text_to_image.train.model import weight_bits
from stages.text_to_image.train.objective import FlowMatching
from stages.text_to_image.train.reader import MicroBatch
from stages.text_to_image.train.replay import replay
from stages.text_to_image.train.selection import DataConfig, MaskConfig, ValidationConfig
from stages.text_to_image.train.stage import STAGE
from stages.tuner import checkpoint, quantize
from stages.tuner import step as tuner_step
from stages.tuner.adapters import lora
from stages.tuner.adapters.stacks import Stacks
from stages.tuner.config import EmaConfig, OptimizerConfig, ScheduleConfig
from stages.tuner.step import TrainingStep
from tests.stages.text_to_image.train.runs import BASE, SHAPES, TEXT_ROWS, TINY, Run, rows_of, tables, weights, words
from tests.stages.tuner.blockwise.test_backprop import assert_same

ARTIFACTS = "artifacts"
# Every plan asks BLAS for the same products. Micro-batches have fewer rows, for which MKL with several threads rounds otherwise:
# one product is then 7e-7 of its largest value from the true one, and after all of them an array's gradient was seen to differ by
# 4.2e-6 of its largest value (4e-7 with one thread); all arrays together by 9e-7.
SPLIT = 1e-5


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for every Linear of the blocks to be packed."""
    return weights(tmp_path_factory.mktemp("weights") / "transformer", attention_head_dim=32, axes_dims_rope=(8, 8, 8, 8))


def rich(shapes: tuple[tuple[int, int], ...] = SHAPES) -> dict[str, pa.Table]:
    """The tables with a class caption for every caption, and a mask for every second crop."""
    made = tables(shapes)
    rows = made["captions"].to_pylist()
    classes = [row | {"role": "class", "caption_id": f"class of {row['caption_id']}"} for row in rows if row["role"] == "caption"]
    made["captions"] = rows_of(captions.CAPTIONS, *rows, *classes)
    encoded = [
        {"caption_id": row["caption_id"], "tokens": 3, "shape": [TEXT_ROWS, 24], "tensor": words((TEXT_ROWS, 24), 200 + n)}
        for n, row in enumerate(classes)
    ]
    made["embeddings"] = rows_of(embeddings.EMBEDDINGS, *made["embeddings"].to_pylist(), *encoded)
    crops = made["latents"].to_pylist()
    for n, row in enumerate(crops[::2]):
        count = row["width"] * row["height"] // 256
        row["mask"] = np.random.default_rng(n).integers(0, 256, count, dtype=np.uint8).tobytes()
    made["latents"] = rows_of(latents.LATENTS, *crops)
    return made


EVERYTHING = replace(
    BASE,
    steps=6,
    accumulate=2,
    base_bits=8,
    optimizer=OptimizerConfig(kind="adamw8bit"),
    schedule=ScheduleConfig(shape="cosine", warmup_steps=2, decay_steps=4),
    noise=NoiseConfig(base="mode", strata=3),
    loss=LossConfig(kind="pseudo_huber", weight="half_bell"),
    data=DataConfig(repeats={"image1": 0.5}),
    mask=MaskConfig(),
    preservation=PreservationConfig(every=2),
    validation=ValidationConfig(share=0.2, every=2, sigmas=(0.3, 0.7)),
    ema=EmaConfig(),
)


@pytest.fixture(scope="module")
def whole(transformer: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An unbroken run with everything on."""
    return Run(tmp_path_factory.mktemp("whole"), transformer, EVERYTHING, rich()).go()


def files(run: Run) -> dict[str, bytes]:
    """The results, and the state of the last step."""
    names = [checkpoint.ADAPTER, checkpoint.EMA, f"checkpoints/step-{run.config.steps:06d}/{checkpoint.OPTIMIZER}"]
    return {name: (run.folder / ARTIFACTS / name).read_bytes() for name in names}


@pytest.mark.parametrize("seed", range(3))
def test_with_every_feature_on_a_broken_run_ends_with_the_bits_of_an_unbroken_one(seed, whole, transformer, tmp_path):
    draw = random.Random(seed)
    run = Run(tmp_path, transformer, whole.config, rich())
    for _ in range(3):
        at = draw.randint(1, 5)
        run.go(**({"stop_at": at} if draw.random() < 0.5 else {"kill_at": at, "lose": draw.randint(0, 9)}))
    run.go()
    assert run.rows == whole.rows
    assert files(run) == files(whole)
    best = checkpoint.BEST
    assert (run.folder / ARTIFACTS / best).read_bytes() == (whole.folder / ARTIFACTS / best).read_bytes()


def test_a_kill_within_an_accumulation_repeats_that_step_to_the_bit(whole, transformer, tmp_path, monkeypatch):
    run = Run(tmp_path, transformer, whole.config, rich())
    real, calls = tuner_step.loss_and_grads, iter(range(1, 100))

    def dies(*given: Any) -> Any:
        if next(calls) == 10:  # the second micro-batch of the fourth step: three gradients at every second one
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(tuner_step, "loss_and_grads", dies)
    with pytest.raises(KeyboardInterrupt):
        run.go()
    monkeypatch.setattr(tuner_step, "loss_and_grads", real)
    run.go()
    assert run.rows == whole.rows
    assert files(run) == files(whole)


def test_a_stop_within_an_accumulation_ends_the_step_first(transformer, tmp_path, monkeypatch):
    run = Run(tmp_path, transformer, replace(BASE, accumulate=3))
    asked: list[int] = []
    real = tuner_step.loss_and_grads
    monkeypatch.setattr(tuner_step, "loss_and_grads", lambda *given: [asked.append(1), real(*given)][1])
    context = run.context(lambda: len(asked) >= 2)
    rows = [row for batch in STAGE.run(context) for row in batch.to_pylist()]
    assert {row["step"] for row in rows} == {1}
    assert [saved.step for saved in checkpoint.find_checkpoints(tmp_path / ARTIFACTS)] == [1]


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": OptimizerConfig(kind="adafactor")},
        {"optimizer": OptimizerConfig(kind="lion")},
        {"optimizer": OptimizerConfig(kind="prodigy"), "lr": 1.0},
        {"variant": "dora", "ema": EmaConfig()},
        {"variant": "lokr", "factor": 4},
        {"rank_for": {"attn.to_q": 4, "attn.*": 1}, "alpha_for": {"attn.to_q": 1.0}},
        {"rslora": True, "alpha": 2.0, "memory": "blocks"},
        {"base_bits": 4, "base_bits_for": {"single_transformer_blocks.*": 8}, "micro_batch": 1},
    ],
    ids=lambda change: " ".join(map(str, change)),
)
def test_every_method_and_variant_trains_and_resumes_to_the_bit(change, transformer, tmp_path):
    config = replace(BASE, steps=4, **change)
    straight = Run(tmp_path / "a", transformer, config).go()
    broken = Run(tmp_path / "b", transformer, config).go(stop_at=2).go()
    assert broken.rows == straight.rows
    assert broken.adapter == straight.adapter
    assert all(np.isfinite(row["loss"]) for row in straight.rows)
    assert lora.largest_change(mx.load(str(straight.folder / ARTIFACTS / checkpoint.ADAPTER))).item() > 0


# What a step computes


def step_of(run: Run, step: int = 1) -> tuple[TrainingStep, list[MicroBatch]]:
    """A trainer whose adapter is no longer zero, and what a step trains on."""
    made = run.training()
    draw = np.random.default_rng(5)
    made.masters = Stacks.of(
        {name: value + mx.array(draw.normal(0, 0.1, value.shape).astype(np.float32)) for name, value in made.adapter.items()}
    )
    batches = run.micro_batches(step)
    return made, batches


def distance(ours: dict[str, mx.array], theirs: dict[str, mx.array]) -> float:
    """The length of the difference of two gradients, divided by the length of the second."""
    assert set(ours) == set(theirs)
    difference = sum(
        float(np.square(np.array(ours[name], np.float64) - np.array(theirs[name], np.float64)).sum()) for name in ours
    )
    return (difference / sum(float(np.square(np.array(grad, np.float64)).sum()) for grad in theirs.values())) ** 0.5


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("variant", ["lora", "dora", "lokr"])
def test_plans_and_micro_batches_give_the_same_gradient_with_masks_and_preservation(variant, bits, transformer, tmp_path):
    run = Run(tmp_path, transformer, replace(EVERYTHING, variant=variant, base_bits=bits, batch_size=3), rich())
    made, batches = step_of(run, 4)
    assert any(batch.class_BTJ is not None for batch in batches)
    assert any(batch.mask_BL is not None for batch in batches)
    whole = made.gradient(batches)
    preserved = [pytest.approx(value, rel=1e-5) for value in whole.values("preservation")]
    for plan, samples, tokens in (("blocks", None, None), (2, 3, None), ("whole", None, 30), ("blocks", 1, None)):
        made.plan, made.max_samples, made.max_tokens = plan, samples, tokens
        found = made.gradient(batches)
        np.testing.assert_allclose(np.array(found.losses), np.array(whole.losses), rtol=1e-5)
        assert found.values("preservation") == preserved
        split = found.largest_tokens < whole.largest_tokens
        assert_same(found.grads, whole.grads, SPLIT if split else 1e-6)
        assert distance(found.grads, whole.grads) < 2e-6


def test_preservation_is_the_gradient_of_the_distance_to_the_base(transformer, tmp_path):
    config = replace(BASE, preservation=PreservationConfig(weight=3.0), caption_dropout=0.0)
    run = Run(tmp_path, transformer, config, rich())
    made, batches = step_of(run)
    with_it = made.gradient(batches)
    plain = [replace(batch, class_BTJ=None, class_B=None) for batch in batches]
    without = made.gradient(plain)
    (batch,) = batches
    objective = FlowMatching(TINY.architecture, config.loss)
    inputs = objective.inputs(batch, objective.mix(batch)[0], batch.class_BTJ)
    base_BLC = made.model(**inputs)

    def strayed(adapter: dict[str, mx.array]) -> mx.array:
        def linear_for(block: str) -> Any:
            own = {name.removeprefix(block + "."): a for name, a in adapter.items() if name.startswith(block + ".")}
            return lora.adapted_linear(own, {name.removeprefix(block + "."): s for name, s in made.scales.items()})

        return 3.0 * mx.mean(mx.square(made.model(**inputs, linear_for=linear_for) - base_BLC))

    expected = mx.grad(strayed)(made.adapter)
    assert distance({name: with_it.grads[name] - without.grads[name] for name in expected}, expected) < 1e-4
    assert np.mean(with_it.values("preservation")) == pytest.approx(strayed(made.adapter).item(), rel=1e-5)
    assert without.values("preservation") == [None] * len(batch.samples)


def test_the_preservation_loss_is_in_the_rows_of_the_steps_and_samples_that_have_one(whole):
    trained = [row for row in whole.rows if row["split"] == "train"]
    for row in trained:  # at every second step; a dropped caption has no class
        assert (row["preservation"] is None) == (row["step"] % 2 == 1 or row["dropped"])
    assert all(0 < row["preservation"] < row["loss"] for row in trained if row["preservation"] is not None)
    assert all(row["preservation"] is None for row in whole.rows if row["split"] == "validation")


def test_weights_are_packed_in_the_bits_that_the_settings_say(transformer, tmp_path):
    config = replace(
        BASE, base_bits=4, base_bits_for={"single_transformer_blocks.*": 8, "single_transformer_blocks.*.to_out": 16}
    )
    made = Run(tmp_path, transformer, config).training()
    bits = {
        f"{block.name}.{name}": weight.bits
        for block in made.model.blocks
        for name, weight in block.weights.items()
        if isinstance(weight, quantize.QuantizedWeight)
    }
    single = "single_transformer_blocks.0.attn."
    assert bits.pop(single + "to_qkv_mlp_proj.weight") == 8
    assert single + "to_out.weight" not in bits
    assert len(bits) == 12
    assert set(bits.values()) == {4}
    assert weight_bits("single_transformer_blocks.0.attn.to_out.weight", TINY.architecture, config) == 16
    assert weight_bits("single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight", TINY.architecture, config) == 8
    assert weight_bits("proj_out.weight", TINY.architecture, config) == 16
    assert weight_bits("single_stream_modulation.linear.weight", TINY.architecture, config) == 8, "what steers every block"
    with pytest.raises(ValueError, match=r"base_bits_for: 'attn.to_v_' matches no Linear; nearest: attn.to_v"):
        Run(tmp_path, transformer, replace(BASE, base_bits_for={"attn.to_v_": 8})).training()


# Averages, validation, replay, initial weights


def test_the_average_is_published_beside_the_adapter_and_differs_from_it(whole):
    raw, averaged = (mx.load(str(whole.folder / ARTIFACTS / name)) for name in (checkpoint.ADAPTER, checkpoint.EMA))
    assert set(raw) == set(averaged)
    assert any(not mx.array_equal(raw[name], averaged[name]) for name in raw)
    for saved in checkpoint.find_checkpoints(whole.folder / ARTIFACTS):
        assert saved.intact(checkpoint.EMA)


def test_a_checkpoint_holds_the_rows_since_the_one_before_it(whole):
    found = checkpoint.find_checkpoints(whole.folder / ARTIFACTS)[::-1]
    since = [[row["step"] for row in saved.rows().to_pylist()] for saved in found]
    assert [min(steps) for steps in since] == [0, *(saved.step + 1 for saved in found[:-1])]
    assert [max(steps) for steps in since] == [saved.step for saved in found]


def test_held_out_images_are_measured_and_never_trained_on(whole):
    split = {"train": set(), "validation": set()}
    for row in whole.rows:
        split[row["split"]].add(row["image_id"])
    assert split["validation"]
    assert not split["train"] & split["validation"]
    assert {row["step"] for row in whole.rows if row["split"] == "validation"} == {0, 2, 4, 6}
    assert {row["sigma"] for row in whole.rows if row["split"] == "validation"} == {np.float32(0.3), np.float32(0.7)}


def test_measuring_a_run_does_not_change_what_it_learns(transformer, tmp_path):
    aside = ValidationConfig(paths=("image0",), every=2)
    adapters = [
        Run(tmp_path / str(every), transformer, replace(BASE, steps=4, validation=replace(aside, every=every))).go().adapter
        for every in (1, 4)
    ]
    assert adapters[0] == adapters[1]


def test_runs_with_other_losses_are_measured_alike(transformer, tmp_path):
    aside = ValidationConfig(paths=("image0",))
    plain = Run(tmp_path / "a", transformer, replace(BASE, steps=1, validation=aside)).go()
    other = replace(plain.config, loss=LossConfig(kind="pseudo_huber", weight="bell"))
    weighed = Run(tmp_path / "b", transformer, other).go()
    for ours, theirs in zip(weighed.rows, plain.rows, strict=True):
        assert (ours["loss"] == theirs["loss"]) == (ours["split"] == "validation")


def test_patience_ends_a_run_and_more_patience_makes_it_go_on(transformer, tmp_path):
    stuck = ValidationConfig(paths=("image0",), every=1, patience=2, min_delta=100.0)
    run = Run(tmp_path, transformer, replace(BASE, validation=stuck)).go()
    assert max(step for step, _, _ in run.stored) == 2
    assert any("ended after step 2" in line for line in run.said)
    assert checkpoint.published_step(tmp_path / ARTIFACTS) == 2
    run.loaded = 0
    run.go()
    assert run.loaded == 0
    run.config = replace(run.config, validation=replace(stuck, patience=4))
    run.go()
    assert checkpoint.published_step(tmp_path / ARTIFACTS) == 4
    longest = Run(tmp_path / "other", transformer, run.config).go()
    assert (run.rows, run.adapter) == (longest.rows, longest.adapter)


def test_the_best_adapter_is_that_of_the_lowest_validation_loss(whole):
    means: dict[int, list[float]] = {}
    for row in whole.rows:
        if row["split"] == "validation" and row["step"]:
            means.setdefault(row["step"], []).append(row["loss"])
    best = min(means, key=lambda step: np.mean(means[step]))
    kept = whole.folder / ARTIFACTS / f"checkpoints/step-{best:06d}" / checkpoint.ADAPTER
    assert (whole.folder / ARTIFACTS / checkpoint.BEST).read_bytes() == kept.read_bytes()


@pytest.mark.parametrize("step", [1, 3, 4])
def test_a_step_replayed_gives_its_logged_losses_and_writes_nothing(step, whole):
    before = {path: path.stat().st_mtime_ns for path in whole.folder.rglob("*")}
    found = replay(whole.context(), step)
    assert [one.loss for one in found] == [one.logged for one in found]
    assert len(found) == len([row for row in whole.rows if (row["step"], row["split"]) == (step, "train")])
    assert before == {path: path.stat().st_mtime_ns for path in whole.folder.rglob("*")}


def test_a_step_that_the_run_does_not_have_cannot_be_replayed(whole):
    with pytest.raises(ValueError, match="replay: the step must be 1 to 6, got 7"):
        replay(whole.context(), 7)


def test_a_run_starts_from_another_adapter_and_its_content_is_part_of_the_recipe(transformer, tmp_path):
    first = Run(tmp_path / "first", transformer).go()
    file = first.folder / ARTIFACTS / checkpoint.ADAPTER
    run = Run(tmp_path / "second", transformer, replace(BASE, initial=str(file), rank=3))
    made = run.training()
    saved = mx.load(str(file))
    for name in made.scales:
        given = saved[name + lora.B] @ saved[name + lora.A]
        np.testing.assert_allclose(
            np.array(made.scales[name] * made.adapter[name + lora.B] @ made.adapter[name + lora.A]), np.array(given), atol=1e-6
        )
    before = STAGE.snapshot(run.context()).to_pylist()
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    assert STAGE.snapshot(run.context()).to_pylist() != before
    run.config = replace(BASE, initial=str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"\[train\] initial: there is no file"):
        STAGE.snapshot(run.context())


def test_an_error_about_adapter_or_targets_names_the_setting(transformer, tmp_path):
    first = Run(tmp_path / "first", transformer, replace(BASE, steps=1)).go()
    file = str(first.folder / ARTIFACTS / checkpoint.ADAPTER)
    for values, said in (
        (
            {"initial": file, "rank": 1},
            r"\[train\] initial: the adapter of .* must have a rank <= 1, got 2: raise the rank to 2",
        ),
        (
            {"initial": file, "targets": ("attn.to_q",)},
            r"\[train\] initial: the adapter has .*, which is not a target: add it to the targets",
        ),
        ({"targets": ("attn.to_z",)}, r"\[train\] targets: 'attn.to_z' matches no Linear of the blocks; nearest: attn.to_"),
        ({"rank_for": {"atn.*": 4}}, r"\[train\] rank_for: 'atn.\*' matches no target; nearest: attn"),
        ({"rslora": True}, r"\[train\] rslora needs an alpha, .*; alpha = 1.41 gives a scale of 1"),
    ):
        with pytest.raises(ValueError, match=said):
            Run(tmp_path / "second", transformer, replace(BASE, **values)).training()


SMALLER = {"attention_head_dim": 16, "axes_dims_rope": (4, 4, 4, 4)}


@pytest.mark.parametrize(
    ("values", "sizes", "said"),
    [
        ({"targets": ("attn.to_q",)}, {}, "initial: the adapter has .*, which is not a target: add it to the targets"),
        ({"rank": 1}, {}, "initial: the adapter of .* must have a rank <= 1, got 2: raise the rank to 2"),
        ({"variant": "lokr"}, {}, "initial: the adapter of .* must be a LoKr .*, got a LoRA"),
        ({}, SMALLER, r"initial: the adapter of .* must be for shape .*, got .*: is it of another model\?"),
    ],
)
def test_an_initial_adapter_that_does_not_fit_is_refused_before_a_weight_is_read(values, sizes, said, transformer, tmp_path):
    first = Run(tmp_path / "first", transformer, replace(BASE, steps=1)).go()
    file = str(first.folder / ARTIFACTS / checkpoint.ADAPTER)
    bare = tmp_path / "transformer"  # sizes, and no weights at all
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(json.loads((transformer / "config.json").read_text()) | sizes))
    with pytest.raises(ValueError, match=said) as caught:
        Run(tmp_path / "second", bare, replace(BASE, initial=file, **values)).go()
    assert "\n" not in str(caught.value)


# Settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"base_bits_for": {"*": 5}}, r"base_bits_for must give 16, 8 or 4 bits, got 5 for '\*'"),
        ({"optimizer": OptimizerConfig(kind="prodigy")}, "lr must be >= 0.01 with prodigy"),
        ({"rslora": True, "variant": "lokr"}, "rslora has no effect with variant"),
        ({"memory": 0}, "memory must be >= 1, got 0"),
        ({"stop_after_minutes": 0.0}, "stop_after_minutes must be >= 1e-12, got 0.0"),
    ],
)
def test_an_error_about_contradictory_settings_names_them(values, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**values)


def test_an_error_about_a_number_that_an_optimizer_lacks_names_it():
    with pytest.raises(ValueError, match="eps is not a setting of lion"):
        OptimizerConfig(kind="lion", eps=1e-6)
