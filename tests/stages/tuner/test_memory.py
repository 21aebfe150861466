"""The estimate of a step's memory beside what MLX measures."""

from __future__ import annotations

import functools
import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.memory import FACTOR, UNPACKED
from stages.models.flux2.transformer import Flux2, Flux2Config, image_ids, text_ids
from stages.text_to_image.families import family
from stages.text_to_image.train.config import TrainConfig
from stages.text_to_image.train.memory import BatchShape, ImageEstimator
from stages.tuner import diffusion
from stages.tuner.adapters import lora
from stages.tuner.adapters.targets import fresh_adapter, select_targets, target_scales, target_weights
from stages.tuner.blockwise.backprop import loss_and_grads
from stages.tuner.blockwise.device import BUFFER_MB, live_memory_limit
from stages.tuner.config import OptimizerConfig
from stages.tuner.memory import Blocks, adjust_max_tokens, frozen_weights, trace, weight_bytes
from stages.tuner.optimizers import step
from stages.tuner.optimizers.adamw import AdamW
from stages.tuner.optimizers.step import OptimizerStep, Stacks
from stages.tuner.step import choose_targets
from stages.tuner.weights import UNPACKED_CHUNK, pack_if_possible

SIZES = {"num_layers": 2, "num_single_layers": 3, "joint_attention_dim": 64, "timestep_guidance_channels": 32}
TEXT = 32
ROOT = Path(__file__).parents[3]


def config(heads: int, width: int) -> Flux2Config:
    rope = {"attention_head_dim": width, "axes_dims_rope": (width // 4,) * 4}
    return Flux2Config.from_dict({**family("tiny").transformer, **SIZES, "num_attention_heads": heads, **rope})


def inputs(c: Flux2Config, height: int, width: int, text: int = TEXT) -> dict:
    return {
        "x_BLC": mx.zeros((1, height * width, c.in_channels)),
        "x_ids_L4": image_ids(height, width),
        "ctx_BTJ": mx.zeros((1, text, c.joint_attention_dim)),
        "ctx_ids_T4": text_ids(text),
        "timesteps_B": mx.array([0.5]),
    }


def nbytes(arrays: dict) -> int:
    return sum(value.nbytes for value in arrays.values())


@functools.cache
def estimate_and_measure(heads: int, width: int, side: int, bits: int, rank: int, variant: str, plan: Any) -> tuple[Blocks, int]:
    """Bytes."""
    c = config(heads, width)
    own = {name: bits if "transformer_blocks." in name else 16 for name in c.shapes()}
    arrays = {
        name: pack_if_possible(mx.random.normal(shape) * shape[-1] ** -0.5, own[name]) for name, shape in c.shapes().items()
    }
    shapes = [(shape, own[name]) for name, shape in c.shapes().items()]
    assert weight_bytes(shapes, 4) == sum(array.nbytes for _, array in tree_flatten(arrays))
    model = Flux2(c, arrays)
    kind = {"orthogonal": True} if variant == "orthogonal" else {"variant": variant}
    targets = select_targets(model.linears(), ["*"], rank, **kind)
    adapter, start = lora.split_start(fresh_adapter(targets, 0, target_weights(model.blocks, targets)))
    optimizer_step = OptimizerStep(AdamW(), 1.0)
    masters = Stacks.of(adapter)
    state = optimizer_step.method.init(masters.arrays)
    batch, target = inputs(c, side, side), mx.zeros((1, side * side, c.in_channels))
    mx.eval(masters.arrays, start, state, batch["x_BLC"], batch["ctx_BTJ"], target, list(arrays.values()))
    del arrays, adapter
    scores = heads * (side * side + TEXT) ** 2 * 4
    meta_model = Flux2(c, {name: mx.zeros(shape) for name, shape in c.shapes().items()})
    given = {name: (shape, own[name]) for name, shape in c.shapes().items()}
    frozen = frozen_weights(meta_model, given, (name for name in given if "transformer_blocks." in name), 4)
    frozen["weights"] += nbytes(start)
    more = {"optimizer_work": optimizer_step.working_bytes(masters), "scores": scores, "saved_scores": scores}
    found = trace(meta_model, batch, targets, **frozen, **more, optimizer_state=nbytes(state))
    assert found.adapter == masters.nbytes

    gc.collect()
    before = mx.get_active_memory() - found.held  # less what other tests hold
    mx.reset_peak_memory()
    loss_of_target = functools.partial(diffusion.mse, target_BLC=target)
    with live_memory_limit(1):
        losses, grads = loss_and_grads(model, masters.unstack() | start, target_scales(targets), batch, loss_of_target, plan)
        mx.eval(losses, grads)
        mx.eval(optimizer_step(masters, grads, state, 1e-4, mx.array(True)))
    return found, mx.get_peak_memory() - before


MODELS = ((2, 64, 12, 16), (4, 64, 12, 4), (4, 32, 20, 16), (4, 64, 4, 8))  # heads, width of a head, side, bits
LONG = pytest.mark.proof("the estimate of a step's memory is near the peak, by model, plan and variant", long=True)
MEASURED = [
    *((*MODELS[1], plan, "lora") for plan in ("blocks", 3, "whole")),
    *((*MODELS[0], "blocks", variant) for variant in ("dora", "lokr")),
    *(pytest.param(*model, plan, "lora", marks=LONG) for model in (MODELS[0], *MODELS[2:]) for plan in ("blocks", 3, "whole")),
    *(pytest.param(*MODELS[1], "whole", variant, marks=LONG) for variant in ("dora", "lokr")),
    *(pytest.param(*MODELS[1], plan, "orthogonal", marks=LONG) for plan in ("blocks", "whole")),
]


@pytest.mark.parametrize(("heads", "width", "side", "bits", "plan", "variant"), MEASURED)
def test_the_estimate_is_within_its_stated_factor_of_the_measured_peak(heads, width, side, bits, plan, variant):
    found, measured = estimate_and_measure(heads, width, side, bits, 4 if side > 4 else 32, variant, plan)
    assert 1 / FACTOR < found.memory(plan).peak / measured < FACTOR


@pytest.mark.parametrize(
    ("variant", "rank", "plan"), [pytest.param("dora", 8, "blocks", marks=LONG), ("dora", 8, "whole"), ("lokr", 64, "whole")]
)
def test_the_estimate_counts_what_a_variant_keeps_beyond_lora(variant, rank, plan):
    (plain, least), (found, most) = (
        estimate_and_measure(*MODELS[1], 4, "lora", plan),
        estimate_and_measure(*MODELS[1], rank, variant, plan),
    )
    expected = found.memory(plan).peak - found.held - (plain.memory(plan).peak - plain.held)
    assert expected == pytest.approx(most - found.held - (least - plain.held), rel=0.4)


def test_the_estimate_counts_the_unpacked_weights_of_one_block():
    (plain, least), (found, most) = (
        estimate_and_measure(4, 64, 4, 16, 32, "lokr", "blocks"),
        estimate_and_measure(4, 64, 4, 4, 32, "lokr", "blocks"),
    )
    assert found.unpacked == 4 * 2304 * 256
    assert found.memory("blocks").peak - found.held - (plain.memory("blocks").peak - plain.held) == UNPACKED * found.unpacked
    assert most - found.held - (least - plain.held) == pytest.approx(UNPACKED * found.unpacked, rel=0.4)
    shapes, c = {"large": ((36864, 6144), 4), "small": ((64, 64), 16)}, config(4, 64)
    meta_model = Flux2(c, {name: mx.zeros(shape) for name, shape in c.shapes().items()})
    assert frozen_weights(meta_model, shapes, shapes, 2)["unpacked"] == UNPACKED_CHUNK


def test_an_estimate_computes_nothing():
    c = config(8, 64)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    meta_model = Flux2(c, {name: mx.zeros(shape) for name, shape in c.shapes().items()})
    assert trace(meta_model, inputs(c, 64, 64)).memory("whole").peak > 100e6
    assert mx.get_peak_memory() - before < 5e6


def test_an_input_of_several_linears_is_kept_once_and_blocks_before_the_first_trained_one_keep_nothing():
    record = family("z-image-tiny")
    sizes = record.architecture.transformer_config(None, record)
    model = record.architecture.meta_transformer(sizes, mx.float32)
    targets = choose_targets(model.linears(), TrainConfig(targets=("layers.*.attention.*",), rank=4))
    found = trace(model, record.architecture.zero_inputs(sizes, 1, (4, 8), 32), targets)
    shared = 4 * 64 * sizes.dim * 3  # q, k and v have one input; w1 and w3 have one
    assert found.kept == (0, 0, *(traffic - shared for traffic in found.traffic[2:]))


def test_more_kept_blocks_never_need_less():
    found = Blocks(100, 10, 20, 5, (50, 50, 40, 40), (50, 50, 40, 40), (3, 3, 4, 4), scores=7, saved_scores=7)
    needs = [found.memory(plan).peak for plan in ("blocks", 1, 2, 3, "whole")]
    assert needs[0] == needs[1]
    assert needs == sorted(needs)


def measured_on_a_gpu() -> list[dict]:
    """Training steps at full size from the benchmark, the last of each configuration."""
    rows = [json.loads(line) for line in (ROOT / "data" / "measurements" / "bench.jsonl").read_text().splitlines()]
    ours = [row for row in rows if row["kind"] == "train" and row["backend"] == "mlx" and row.get("peak_gb")]
    held = [row for row in ours if row["plan"] != "plain" and row["buffer_mb"] == BUFFER_MB]  # as in training
    setup = ("family", "width", "height", "plan", "bits", "optimizer", "unfused", "buffer_mb", "stream")
    return list({tuple(str(row.get(name, False)) for name in setup): row for row in held}.values())


@pytest.mark.parametrize(
    "row",
    measured_on_a_gpu(),
    ids=lambda row: "{family} {width} {height} {plan} {bits} {optimizer} {unfused} {buffer_mb} {stream}".format(
        **{"stream": False} | row
    ),
)
def test_the_estimate_is_within_its_stated_factor_of_a_gpus_peak_at_full_size(row, monkeypatch):
    monkeypatch.setattr(step, "compiles", lambda: True)
    monkeypatch.setattr("stages.models.attention.fused_gradient", lambda q_BHLK: not row["unfused"])
    optimizer, streamed = OptimizerConfig(kind=row["optimizer"]), row.get("stream", False)
    c = TrainConfig(base_bits=row["bits"], rank=row["rank"], optimizer=optimizer, stream_blocks=streamed)
    record = family(row["family"])
    sizes = record.architecture.transformer_config(None, record)
    batch = BatchShape(1, row["width"], row["height"], 512, 16)
    found = ImageEstimator(c, record.architecture, sizes, batch).blocks(1)
    plan = int(row["plan"]) if row["plan"].isdigit() else row["plan"]
    assert 1 / FACTOR < found.memory(plan).peak / (row["peak_gb"] * 1e9) < FACTOR


# What is decided from numbers alone


def test_the_micro_batch_halves_above_the_limit_and_doubles_if_the_peak_then_stays_below_nine_tenths_of_it():
    for peak, tokens in ((50, 200), (51, 100), (100, 100), (101, 50)):
        assert adjust_max_tokens(100, 100, held=10, peak=peak, limit=100) == tokens
    assert adjust_max_tokens(100, 40, held=10, peak=20, limit=100) == 100, "a small step says nothing about a large one"


def test_unpacked_weights_are_no_allowance_for_working_ahead():
    packed = Blocks(100, 10, 20, 5, (50, 50, 40, 40), (50, 50, 40, 40), (3, 3, 4, 4), unpacked=30)
    bare, limit = replace(packed, unpacked=0), 10**6
    assert packed.memory("blocks").peak > bare.memory("blocks").peak
    assert packed.memory("blocks", limit).live == bare.memory("blocks", limit).live > bare.memory("blocks").peak
    assert packed.memory("whole", limit).live == limit - round(0.25 * packed.block_work) < limit
