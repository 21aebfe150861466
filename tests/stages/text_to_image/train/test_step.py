"""What a step computes: losses and gradients, for every plan, size of micro-batches and variant."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from stages.text_to_image.train.batches import MicroBatch
from stages.text_to_image.train.config import PreservationConfig, TLoraConfig
from stages.text_to_image.train.task import FlowMatching
from stages.text_to_image.weights import weight_bits
from stages.tuner.memory import MemoryPlan
from stages.tuner.optimizers.step import Stacks
from stages.tuner.step import TrainingStep
from stages.tuner.weights import QuantizedWeight
from tests.stages.text_to_image.train.plans import noted
from tests.stages.text_to_image.train.runs import BASE, EVERYTHING, TINY, Run, rich_tables
from tests.stages.tuner.blockwise.test_backprop import assert_same, linear_for

# Every plan asks BLAS for the same products. Micro-batches have fewer rows, for which MKL with several threads rounds otherwise:
# one product is then 7e-7 of its largest value from the true one, and after all of them an array's gradient was seen to differ by
# 4.2e-6 of its largest value (4e-7 with one thread); all arrays together by 9e-7.
SPLIT = 1e-5


@pytest.fixture(scope="module")
def transformer(wide: Path) -> Path:
    return wide


def test_under_bfloat16_the_masters_stay_float32_and_an_orthogonal_start_is_subtracted_before_it_is_rounded(
    transformer, tmp_path, monkeypatch
):
    given = noted(monkeypatch, lambda *given: {value.dtype for value in given[1].values()})
    config = replace(BASE, steps=2, precision="bfloat16")
    Run(tmp_path / "orthogonal", transformer, replace(config, steps=1, tlora=TLoraConfig(1))).go()
    assert given and all(each == {mx.float32} for each in given)
    run = Run(tmp_path, transformer, config).go()
    arrays = mx.load(str(tmp_path / "artifacts" / "adapter.safetensors"))
    assert {value.dtype for value in arrays.values()} == {mx.float32}
    assert any("bfloat16 is slow on a CPU" in line for line in run.said) == (mx.default_device() == mx.cpu)
    assert all(np.isfinite(row["loss"]) for row in run.rows)


def step_of(run: Run, step: int = 1) -> tuple[TrainingStep, list[MicroBatch]]:
    made = run.training()
    draw = np.random.default_rng(5)
    made.masters = Stacks.of(
        {name: value + mx.array(draw.normal(0, 0.1, value.shape).astype(np.float32)) for name, value in made.adapter.items()}
    )
    batches = run.micro_batches(step)
    return made, batches


def distance(ours: dict[str, mx.array], theirs: dict[str, mx.array]) -> float:
    assert set(ours) == set(theirs)
    difference = sum(
        float(np.square(np.array(ours[name], np.float64) - np.array(theirs[name], np.float64)).sum()) for name in ours
    )
    return (difference / sum(float(np.square(np.array(grad, np.float64)).sum()) for grad in theirs.values())) ** 0.5


LONG = pytest.mark.proof("plans and micro-batches give the same gradient, with every variant and 4 or 16 bits", long=True)


@pytest.mark.parametrize(
    ("variant", "bits"),
    [
        ("dora", 4),
        ("lokr", 16),
        *(pytest.param(*case, marks=LONG) for case in (("lora", 4), ("lora", 16), ("dora", 16), ("lokr", 4))),
    ],
)
def test_plans_and_micro_batches_give_the_same_gradient_with_masks_and_preservation(variant, bits, transformer, tmp_path):
    run = Run(tmp_path, transformer, replace(EVERYTHING, variant=variant, base_bits=bits, batch_size=3), rich_tables())
    made, batches = step_of(run, 4)
    assert any(batch.class_BTJ is not None for batch in batches)
    assert any(batch.mask_BL is not None for batch in batches)
    whole = made.gradient(batches)
    values = whole.values("preservation")
    assert any(value is not None for value in values)
    preserved = [value if value is None else pytest.approx(value, rel=1e-5) for value in values]
    # Two samples and one, which count by their number; all at once; one by one.
    for plan, samples, tokens in (("blocks", 2, None), (2, None, None), ("whole", None, 30)):
        made.memory = MemoryPlan(plan, max_samples=samples, max_tokens=tokens)
        found = made.gradient(batches)
        np.testing.assert_allclose(np.array(found.losses), np.array(whole.losses), rtol=1e-5)
        assert found.values("preservation") == preserved
        split = found.largest_tokens < whole.largest_tokens
        assert_same(found.grads, whole.grads, SPLIT if split else 1e-6)
        assert distance(found.grads, whole.grads) < 2e-6


def test_preservation_is_the_gradient_of_the_distance_to_the_base(transformer, tmp_path):
    config = replace(BASE, preservation=PreservationConfig(weight=3.0), caption_dropout=0.0)
    run = Run(tmp_path, transformer, config, rich_tables())
    made, batches = step_of(run)
    with_it = made.gradient(batches)
    plain = [replace(batch, class_BTJ=None, class_B=None) for batch in batches]
    without = made.gradient(plain)
    (batch,) = batches
    objective = FlowMatching(TINY.architecture, config.loss)
    inputs = objective.inputs(batch, objective.mix(batch)[0], batch.class_BTJ)
    base_BLC = made.model(**inputs)

    def loss_of_base(adapter: dict[str, mx.array]) -> mx.array:
        found_BLC = made.model(**inputs, linear_for=linear_for(adapter, made.scales))
        return 3.0 * mx.mean(mx.square(found_BLC - base_BLC))

    expected = mx.grad(loss_of_base)(made.adapter)
    assert distance({name: with_it.grads[name] - without.grads[name] for name in expected}, expected) < 1e-4
    assert np.mean(with_it.values("preservation")) == pytest.approx(loss_of_base(made.adapter).item(), rel=1e-5)
    assert without.values("preservation") == [None] * len(batch.samples)


def test_weights_are_packed_in_the_bits_that_the_settings_say(transformer, tmp_path):
    config = replace(
        BASE, base_bits=4, base_bits_for={"single_transformer_blocks.*": 8, "single_transformer_blocks.*.to_out": 16}
    )
    made = Run(tmp_path, transformer, config).training()
    bits = {
        f"{block.name}.{name}": weight.bits
        for block in made.model.blocks
        for name, weight in block.weights.items()
        if isinstance(weight, QuantizedWeight)
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
