import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest

from stages import blas
from stages.models.t5.model import T5, T5Config
from stages.own_gradient import OwnGradient
from stages.tuner.blockwise import cores as cores_file
from stages.tuner.blockwise import device
from stages.tuner.blockwise.backprop import loss_and_grads, predict
from stages.tuner.blockwise.cores import Cores, DividedChain, on_cores
from stages.tuner.blockwise.forward import BlockwiseForward
from tests.stages.tuner.blockwise.test_backprop import PLANS, assert_same, batch, loss_of, tiny, trained

SAMPLES = 5  # 2 and 3 on two cores, 1, 2 and 2 on three


@pytest.fixture
def use_cores(monkeypatch):
    """A function that lets this process use so many cores. It returns the numbers of BLAS threads that were set."""

    def use(count: int) -> list[int]:
        found, asked = Cores([mx.new_thread_local_stream(mx.cpu) for _ in range(count)]), list[int]()
        monkeypatch.setattr(cores_file, "cores", lambda: found)
        monkeypatch.setattr(device, "cores", lambda: found)
        monkeypatch.setattr(blas, "set_threads", asked.append)
        return asked

    return use


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("count", [2, 3])
def test_several_cores_give_the_losses_and_gradients_of_one(count, plan, use_cores):
    model = tiny()
    adapters, scales = trained(model)
    true_B, true = loss_and_grads(model, adapters, scales, batch(SAMPLES), loss_of(SAMPLES), plan)
    mx.eval(true_B, true)
    use_cores(count)
    assert isinstance(on_cores(model, batch(SAMPLES)), DividedChain)
    losses_B, grads = loss_and_grads(model, adapters, scales, batch(SAMPLES), loss_of(SAMPLES), plan)
    assert mx.allclose(losses_B, true_B, rtol=1e-6)
    assert_same(grads, true, bound=1e-5)


def test_two_runs_on_several_cores_give_the_same_bits(use_cores):
    model = tiny()
    adapters, scales = trained(model)
    use_cores(2)
    runs = [loss_and_grads(model, adapters, scales, batch(SAMPLES), loss_of(SAMPLES), "blocks") for _ in range(3)]
    for losses_B, grads in runs[1:]:
        assert mx.array_equal(losses_B, runs[0][0])
        assert_same(grads, runs[0][1], bound=0)


def test_a_prediction_of_several_cores_has_the_samples_in_order(use_cores):
    model = tiny()
    adapters, scales = trained(model)
    alone_BLC = predict(model, adapters, scales, batch(SAMPLES))
    mx.eval(alone_BLC)
    use_cores(3)
    for found_BLC in (
        predict(model, adapters, scales, batch(SAMPLES)),
        BlockwiseForward(model, adapters, scales)(**batch(SAMPLES)),
    ):
        assert mx.allclose(found_BLC, alone_BLC, rtol=1e-5, atol=1e-6)


def test_a_thread_of_the_program_computes_on_several_cores_too(use_cores):
    model = tiny()
    use_cores(2)
    forward = BlockwiseForward(model)
    alone_BLC = np.array(forward(**batch(SAMPLES)))
    with ThreadPoolExecutor(1) as pool:
        assert np.array_equal(pool.submit(lambda: np.array(forward(**batch(SAMPLES)))).result(), alone_BLC)


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


def test_one_sample_one_core_and_a_gpu_divide_nothing(use_cores, monkeypatch):
    model = tiny()
    use_cores(1)
    assert on_cores(model, batch(SAMPLES)) is model
    use_cores(4)
    assert on_cores(model, batch(1)) is model
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert on_cores(model, batch(SAMPLES)) is model


def test_the_parts_of_a_batch_share_the_cores_for_their_products(use_cores):
    asked = use_cores(4)
    for size in (2, 2, 1, 7):
        on_cores(tiny(), batch(size))
    assert asked == [2, 4, 1]  # 2 threads for each of two parts, all 4 for one sample, 1 for each of four parts


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


def test_the_number_of_threads_is_that_of_the_variable_or_of_the_cores(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert blas.threads() == 3
    for value in ("0", "many", ""):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert 1 <= blas.threads() <= (os.cpu_count() or 1)


def test_a_graph_is_computed_in_turn_on_several_cores_only(use_cores, monkeypatch):
    monkeypatch.setenv(device.WIDTH_VARIABLE, "")  # so that it is restored afterwards
    monkeypatch.delenv(device.WIDTH_VARIABLE)
    use_cores(1)
    device.configure_scheduler()
    assert device.WIDTH_VARIABLE not in os.environ
    use_cores(2)
    device.configure_scheduler()
    assert os.environ[device.WIDTH_VARIABLE] == device.WIDTH
    monkeypatch.setenv(device.WIDTH_VARIABLE, "30")
    device.configure_scheduler()
    assert os.environ[device.WIDTH_VARIABLE] == "30"
