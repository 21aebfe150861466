import os

import mlx.core as mx
import pytest

import stages  # noqa: F401  a fast BLAS, before MLX
from stages.tuner.blockwise.device import (
    BUFFER_VARIABLE,
    CONVOLUTIONS,
    EXACT,
    compute_exactly,
    configure_convolutions,
    configure_scheduler,
    live_memory_limit,
)

H200 = {"compute_capability_major": 9, "compute_capability_minor": 0}
SPARK = {"compute_capability_major": 12, "compute_capability_minor": 1}


def test_a_live_memory_limit_is_mlxs_limit_inside_and_the_old_one_afterwards():
    before = mx.get_memory_limit()
    with live_memory_limit(12345):
        assert mx.get_memory_limit() == 12345
    assert mx.get_memory_limit() == before
    with pytest.raises(KeyboardInterrupt), live_memory_limit(12345):
        raise KeyboardInterrupt
    assert mx.get_memory_limit() == before
    with live_memory_limit(None):
        assert mx.get_memory_limit() == before


def test_on_metal_the_memory_that_is_needed_is_wired_and_never_more_than_the_working_set(monkeypatch):
    wired = []
    monkeypatch.setattr(mx, "set_wired_limit", lambda limit: wired.append(limit) or 0)
    with live_memory_limit(12345):
        assert wired == []
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 20_000})
    for limit in (12345, 30_000):
        with live_memory_limit(limit):
            pass
    assert wired == [12345, 20_000]


def test_exact_computation_switches_tf32_and_winograd_off_unless_the_user_has_chosen(monkeypatch):
    for name in EXACT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLX_ENABLE_TF32", "1")
    compute_exactly()
    assert (os.environ["MLX_ENABLE_TF32"], os.environ["MLX_CONV_WINOGRAD"]) == ("1", "0")


def pretend_device(monkeypatch: pytest.MonkeyPatch, info: dict, device=mx.gpu, cuda: bool = True) -> None:
    monkeypatch.delenv(BUFFER_VARIABLE, raising=False)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(mx, "default_device", lambda: device)
    monkeypatch.setattr(mx, "device_info", lambda: info)


@pytest.mark.parametrize(
    ("where", "own", "limit"),
    [
        ((H200,), None, "200"),
        ((H200,), "1000", "1000"),
        ((H200, mx.cpu), None, None),
        ((H200, mx.gpu, False), None, None),  # Metal
        ((SPARK,), None, None),  # where MLX's own limit is smaller
        (({"device_name": "no compute capability"},), None, None),
    ],
)
def test_command_buffers_are_limited_on_a_cuda_device_with_large_ones_and_to_the_users_own_limit(where, own, limit, monkeypatch):
    pretend_device(monkeypatch, *where)
    if own:
        monkeypatch.setenv(BUFFER_VARIABLE, own)
    configure_scheduler()
    assert os.environ.get(BUFFER_VARIABLE) == limit


def test_the_autoencoder_computes_without_cuda_graphs_on_cuda_alone_and_a_users_setting_stays(monkeypatch):
    for name in CONVOLUTIONS:
        monkeypatch.delenv(name, raising=False)
    for device, cuda in ((mx.cpu, True), (mx.gpu, False)):
        pretend_device(monkeypatch, H200, device, cuda)
        configure_convolutions()
        assert not CONVOLUTIONS.keys() & os.environ.keys()
    pretend_device(monkeypatch, H200)
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "50")
    configure_convolutions()
    assert (os.environ["MLX_USE_CUDA_GRAPHS"], os.environ["MLX_MAX_OPS_PER_BUFFER"]) == ("0", "50")
