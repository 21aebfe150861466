"""Blocks whose weights stay on disk: the same bits, two blocks in memory at most, and nothing left behind."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages import blas
from stages.models.family import Block
from stages.models.flux2.transformer import Flux2, Flux2Config, image_ids, text_ids
from stages.models.t5.model import T5, T5Config
from stages.own_gradient import OwnGradient
from stages.tuner import diffusion
from stages.tuner.adapters import lora
from stages.tuner.adapters.targets import fresh_adapter, select_targets, target_scales
from stages.tuner.blockwise import device
from stages.tuner.blockwise.backprop import (
    BlockwiseForward,
    DividedChain,
    loss_and_grads,
    model_forward,
    on_cores,
    predict,
    predict_base,
)
from stages.tuner.blockwise.device import Cores, live_memory_limit
from stages.tuner.memory import Blocks
from stages.tuner.weights import WeightFolder, pack_if_possible, platform, read, unpacked

CONFIG = Flux2Config(
    in_channels=8,
    num_layers=2,
    num_single_layers=3,
    attention_head_dim=32,
    num_attention_heads=2,
    joint_attention_dim=24,
    timestep_guidance_channels=16,
    mlp_ratio=3.0,
    axes_dims_rope=(8, 8, 8, 8),
    rope_theta=2000,
    eps=1e-6,
    guidance_embeds=False,
)
PLANS = ["whole", "blocks", 2, 4]


def tiny(dtype: mx.Dtype = mx.float32, config: Flux2Config = CONFIG) -> Flux2:
    rng = np.random.default_rng(1)
    draw = {name: rng.normal(size=shape) / shape[-1] ** 0.5 for name, shape in config.shapes().items()}
    return Flux2(config, {name: mx.array(value, dtype) for name, value in draw.items()})


def packed_and_dense(bits: int, config: Flux2Config = CONFIG) -> tuple[Flux2, Flux2]:
    """A model with packed weights, and one with the values that they unpack to."""
    model, dense = tiny(config=config), tiny(config=config)
    for block, other in zip(model.blocks, dense.blocks, strict=True):
        block.weights.update({name: pack_if_possible(weight, bits) for name, weight in block.weights.items()})
        other.weights.update({name: unpacked(weight) for name, weight in block.weights.items()})
    return model, dense


def filled(fresh: dict[str, mx.array], size: float = 0.15) -> dict[str, mx.array]:
    """Arrays as they are after some steps: nothing zero, magnitudes a little off their start."""
    drawn = {name: mx.random.normal(value.shape, key=mx.random.key(i)) for i, (name, value) in enumerate(fresh.items())}
    zero = {name: size * drawn[name] for name in fresh if name.endswith(lora.ZERO_AT_START)}
    return (
        fresh | zero | {name: value * (1 + 0.1 * drawn[name]) for name, value in fresh.items() if name.endswith(lora.MAGNITUDE)}
    )


def trained(model: Flux2, patterns: tuple[str, ...] = ("*",)) -> tuple[dict[str, mx.array], dict[str, float]]:
    targets = select_targets(model.linears(), patterns, rank=4, alpha=6.0)
    return filled(fresh_adapter(targets, seed=3)), target_scales(targets)


def batch(size: int = 2) -> dict:
    rng = np.random.default_rng(7)
    return {
        "x_BLC": mx.array(rng.normal(size=(size, 12, 8)), mx.float32),
        "x_ids_L4": image_ids(3, 4),
        "ctx_BTJ": mx.array(rng.normal(size=(size, 5, 24)), mx.float32),
        "ctx_ids_T4": text_ids(5),
        "timesteps_B": mx.array(rng.uniform(size=size), mx.float32),
    }


def loss_of(size: int = 2):
    return functools.partial(diffusion.mse, target_BLC=mx.random.normal((size, 12, 8), key=mx.random.key(9)))


def linear_for(adapters, scales):
    def of(block):
        inside = {n.removeprefix(f"{block}."): a for n, a in adapters.items() if n.startswith(f"{block}.")}
        return lora.AdaptedLinear(inside, {n.removeprefix(f"{block}."): s for n, s in scales.items()})

    return of


def whole_graph_gradients(model, adapters, scales, inputs, loss):
    """Losses and gradients of the whole model as one plain graph."""

    def run(adapters):
        losses_B = loss(model(**inputs, linear_for=linear_for(adapters, scales)))
        return losses_B.mean(), losses_B

    (_, losses_B), grads = mx.value_and_grad(run)(adapters)
    return losses_B, grads


def assert_same(found, wanted, bound=1e-6):
    """Up to `bound` times the largest gradient of each array."""
    assert set(found) == set(wanted)
    for name, grad in wanted.items():
        size = mx.abs(grad).max().item()
        assert size > 0, f"{name} takes no gradient"
        assert mx.abs(found[name] - grad).max().item() <= bound * size, name


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "patterns", [("*",), ("single_transformer_blocks.1.attn.to_out",), ("transformer_blocks.1.ff.*", "attn.to_q")]
)
def test_every_plan_gives_the_gradients_of_the_whole_graph_also_through_blocks_without_adapters(patterns, plan):
    model = tiny()
    adapters, scales = trained(model, patterns)
    losses_B, grads = loss_and_grads(model, adapters, scales, batch(), loss_of(), plan)
    true_B, true = whole_graph_gradients(model, adapters, scales, batch(), loss_of())
    assert mx.allclose(losses_B, true_B, rtol=1e-6)
    assert_same(grads, true)
    assert {g.dtype for g in grads.values()} == {mx.float32}


class Stream:
    """Blocks of one Linear each: memory can be counted in their inputs, if these have many rows, else in their weights."""

    def __init__(self, count: int = 20, rows: int = 1000, width: int = 64) -> None:
        def normal(seed: int, *shape: int) -> mx.array:
            return mx.random.normal(shape, key=mx.random.key(seed)) / width**0.5

        self.x_BK, self.width = normal(1, rows, width), width
        self.blocks = [Block("stream", f"streams.{i}", {"fc.weight": normal(100 + i, width, width)}) for i in range(count)]
        self.scales = {f"{block.name}.fc": 0.1 for block in self.blocks}
        self.adapters = {f"{name}.lora_A.weight": normal(2, 2, width) for name in self.scales}
        self.adapters |= {f"{name}.lora_B.weight": normal(3, width, 2) for name in self.scales}
        self.dtype = mx.float32
        mx.eval(self.x_BK, self.adapters, [block.weights for block in self.blocks])

    def linears(self):
        return dict.fromkeys(self.scales, (self.width, self.width))

    def enter(self, x_BK):
        return x_BK, {"shift": x_BK.mean()}

    @staticmethod
    def block(kind):
        return lambda weights, h, shared, linear: h + mx.tanh(linear("fc", weights["fc.weight"], mx.tanh(h)) + shared["shift"])

    def leave(self, h, shared):
        return h

    def gradient(self, plan: Any):
        return loss_and_grads(self, self.adapters, self.scales, {"x_BK": self.x_BK}, lambda h: mx.square(h).mean(-1), plan)


def peak(compute: Any, unit: int, above: float | None = None) -> float:
    """The peak of MLX's memory while `compute()` runs, in units of `unit` bytes, with a live memory limit of `above` units."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with live_memory_limit(None if above is None else before + round(above * unit)):
        mx.eval(compute())
    return (mx.get_peak_memory() - before) / unit


def test_a_live_memory_limit_holds_the_peak_of_a_deep_chain_near_the_least_possible():
    """Twenty block inputs and one block's work are needed, 24 inputs in all; without a limit it is 32."""
    chain = Stream()
    free, least, limited = (peak(lambda: chain.gradient("blocks"), chain.x_BK.nbytes, above) for above in (None, 0, 26))
    assert least < 25
    assert free > least + 5, "without a limit, MLX submits work far ahead"
    assert limited < 27.5


def test_a_dropped_model_is_freed_with_its_compiled_functions():
    gc.collect()
    before = mx.get_active_memory()
    model = tiny()
    adapters, scales = trained(model)
    mx.eval(loss_and_grads(model, adapters, scales, batch(), loss_of(), "blocks"))
    del model, adapters
    gc.collect()
    assert mx.get_active_memory() <= before + 4096


def streamed(model: Any, folder: Path) -> Any:
    files = WeightFolder(folder)
    for block in model.blocks:
        for name, weight in block.weights.items():
            if len(weight.shape) == 2:
                block.weights[name] = files.store(f"{block.name}.{name}", weight)
    files.belongs_to(model)
    return model


@pytest.mark.parametrize(("plan", "bits"), [("whole", 16), ("blocks", 8), ("blocks", 4), (2, 4)])
def test_weights_read_from_disk_give_the_same_bits_of_every_gradient(plan, bits, tmp_path):
    found = []
    for on_disk in (False, True):
        model, _ = packed_and_dense(bits)
        adapters, scales = trained(model)
        model = streamed(model, tmp_path) if on_disk else model
        losses_B, grads = loss_and_grads(model, adapters, scales, batch(), loss_of(), plan)
        drawn = model_forward(model, (adapters, scales))(**batch())
        found.append(({"loss": losses_B, "drawn": drawn, "base": predict_base(model, batch())}, grads))
    (kept, kept_grads), (read, read_grads) = found
    assert_same(read, kept, 0)
    assert_same(read_grads, kept_grads, 0)


@pytest.mark.parametrize(("plan", "most"), [("blocks", 2.2), (4, 5.4)])
def test_the_peak_is_that_of_two_blocks_or_of_those_that_keep_their_activations(plan, most, tmp_path):
    count, width = 8, 1024
    weight = 4 * width**2  # bytes
    chain = streamed(Stream(count, 4, width), tmp_path)
    needs = Blocks(0, 0, 0, 0, (0,) * count, (0,) * count, (0,) * count, stored=(weight,) * count)
    assert peak(lambda: chain.gradient(plan), weight) < most
    assert needs.stored_work(plan) == (2 if plan == "blocks" else 5) * weight
    if plan == "blocks":
        assert peak(lambda: model_forward(chain, None)(x_BK=chain.x_BK), weight) < most


def test_the_files_are_deleted_with_the_model_and_those_of_ended_processes_with_the_next(tmp_path, monkeypatch):
    left = tmp_path / f"{platform.node()}-999999999"
    left.mkdir()
    (left / "a.safetensors").write_bytes(b"")
    other = tmp_path / "another-machine-1"
    other.mkdir()
    model = streamed(Stream(), tmp_path)
    assert not left.exists() and other.exists() and len(list(tmp_path.glob("*/*.safetensors"))) == 20
    del model
    gc.collect()
    assert list(tmp_path.iterdir()) == [other]


def test_two_models_of_one_process_keep_their_files_apart(tmp_path):
    first, second = WeightFolder(tmp_path), WeightFolder(tmp_path)
    weights = [folder.store("toys.0", value * mx.ones((8, 64))) for value, folder in ((1, first), (2, second))]
    assert [float(read(one).max()) for one in weights] == [1, 2]


def test_a_file_that_the_disk_has_no_room_for_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(mx, "save_safetensors", lambda path, arrays: Path(path).write_bytes(b"cut short"))
    with pytest.raises(OSError, match=r"toys\.0\.safetensors could not be written in full: free disk space"):
        WeightFolder(tmp_path).store("toys.0", mx.ones((8, 64)))


SAMPLES = 5  # 2 and 3 on two cores, 1, 2 and 2 on three


@pytest.fixture
def use_cores(monkeypatch):
    """A function that lets this process use so many cores. It returns the numbers of BLAS threads that were set."""

    def use(count: int) -> list[int]:
        found, asked = Cores([mx.new_thread_local_stream(mx.cpu) for _ in range(count)]), list[int]()
        monkeypatch.setattr("stages.tuner.blockwise.backprop.cores", lambda: found)
        monkeypatch.setattr(device, "cores", lambda: found)
        monkeypatch.setattr(blas, "set_threads", asked.append)
        return asked

    return use


@pytest.mark.parametrize(("count", "plan"), [(2, "whole"), (2, 4), (3, "blocks"), (3, 2)])
def test_several_cores_give_the_losses_and_gradients_of_one_and_every_time_the_same_bits(count, plan, use_cores):
    model = tiny()
    adapters, scales = trained(model)
    for name in list(scales)[::2]:  # every second one with a mask of ranks
        mask_BR = mx.random.bernoulli(0.7, (SAMPLES, adapters[name + lora.A].shape[0]), mx.random.key(3))
        scales[name] = scales[name] * mask_BR.astype(mx.float32)
    true_B, true = loss_and_grads(model, adapters, scales, batch(SAMPLES), loss_of(SAMPLES), plan)
    mx.eval(true_B, true)
    use_cores(count)
    assert isinstance(on_cores(model, batch(SAMPLES)), DividedChain)
    losses_B, grads = loss_and_grads(model, adapters, scales, batch(SAMPLES), loss_of(SAMPLES), plan)
    assert mx.allclose(losses_B, true_B, rtol=1e-6)
    assert_same(grads, true, bound=1e-5)
    again_B, same = loss_and_grads(model, adapters, scales, batch(SAMPLES), loss_of(SAMPLES), plan)
    assert mx.array_equal(again_B, losses_B)
    assert_same(same, grads, bound=0)


def test_a_prediction_of_several_cores_has_the_samples_in_order_in_any_thread(use_cores):
    model = tiny()
    adapters, scales = trained(model)
    alone_BLC = predict(model, adapters, scales, batch(SAMPLES))
    mx.eval(alone_BLC)
    use_cores(3)
    forward = BlockwiseForward(model, adapters, scales)
    found_BLC = np.array(forward(**batch(SAMPLES)))
    for each_BLC in (predict(model, adapters, scales, batch(SAMPLES)), found_BLC):
        assert np.allclose(each_BLC, alone_BLC, rtol=1e-5, atol=1e-6)
    with ThreadPoolExecutor(1) as pool:
        assert np.array_equal(pool.submit(lambda: np.array(forward(**batch(SAMPLES)))).result(), found_BLC)


def test_several_texts_of_queries_and_documents_are_divided_alike(use_cores):
    """A retriever's batch: two queries, and three documents for each of them."""
    sizes = {"vocab_size": 50, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    config = T5Config.from_dict({**sizes, "feed_forward_proj": "gated-gelu"}, dimensions=8)
    rng = np.random.default_rng(0)
    model = T5(config, {name: mx.array(rng.normal(size=shape), mx.float32) for name, shape in config.shapes().items()})
    ids = [mx.array(rng.integers(1, 50, shape).astype(np.int32)) for shape in ((2, 4), (6, 7))]
    real = [mx.array(np.arange(part.shape[1])[None] < rng.integers(1, 7, part.shape[0])[:, None]) for part in ids]
    alone = model(ids, real)
    mx.eval(alone)
    use_cores(2)
    found = BlockwiseForward(model)(ids=ids, real=real)
    assert [part.shape for part in found] == [(2, 4, 8), (6, 7, 8)]
    assert all(mx.allclose(part, other, atol=1e-5) for part, other in zip(found, alone, strict=True))


def test_a_gradient_of_its_own_is_computed_on_the_stream_of_the_operation():
    stream, streams = mx.new_stream(mx.cpu), []

    @OwnGradient
    def double(x):
        return 2 * x

    @double.vjp
    def _(x, dy, y):
        streams.append(mx.default_stream(mx.cpu))
        return 2 * dy

    def run(x):
        with mx.stream(stream):
            return double(x).sum()

    assert mx.grad(run)(mx.ones(3)).tolist() == [2, 2, 2]
    assert streams == [stream]


def test_the_parts_of_a_batch_share_the_cores_and_one_sample_one_core_and_a_gpu_divide_nothing(use_cores, monkeypatch):
    model = tiny()
    use_cores(1)
    assert on_cores(model, batch(SAMPLES)) is model
    asked = use_cores(4)
    assert [on_cores(model, batch(size)) is model for size in (2, 2, 1, 7)] == [False, False, True, False]
    assert asked == [2, 4, 1]  # 2 threads for each of two parts, all 4 for one sample, 1 for each of four parts
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert on_cores(model, batch(SAMPLES)) is model


def test_the_blas_library_uses_the_number_of_threads_that_is_set():
    library = blas.load()
    if "mkl" not in library:
        pytest.skip("MKL is not installed")
    threads = ctypes.CDLL(library).MKL_Get_Max_Threads
    before = threads()
    try:
        for count in (1, min(2, os.cpu_count() or 1)):
            blas.set_threads(count)
            assert threads() == count
    finally:
        blas.set_threads(before)
