"""Memory as the machine counts it, on drivers and systems that are imitated."""

import ctypes
import subprocess
import sys

import numpy as np
import pytest

from stages import footprint


class Driver:
    """Functions of CUDA and NVML; every one succeeds. `used` is of the whole device, `pool` by attribute."""

    def __init__(self) -> None:
        self.used, self.pool, self.active = 0, {footprint.RESERVED: 0, footprint.MOST_RESERVED: 0}, 1

    def __getattr__(self, name):
        return lambda *given: 0

    def nvmlDeviceGetMemoryInfo(self, handle, found):
        found._obj.used = self.used
        return 0

    def cuMemPoolGetAttribute(self, pool, attribute, found):
        found._obj.value = self.pool[attribute]
        return 0

    def cuDevicePrimaryCtxGetState(self, device, flags, active):
        active._obj.value = self.active
        return 0


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    monkeypatch.setattr(sys, "platform", "linux")
    footprint.gpu.cache_clear()
    yield made
    footprint.gpu.cache_clear()


def test_on_cuda_the_peak_is_what_the_driver_counts_less_what_others_had_with_the_pool_at_its_largest(driver):
    driver.used = 3_000
    footprint.gpu()
    driver.used, driver.pool = 10_000, {footprint.RESERVED: 4_000, footprint.MOST_RESERVED: 6_000}
    assert footprint.peak() == 10_000 - 3_000 + 2_000
    driver.active = 0
    assert footprint.peak() == footprint.peak_resident(), "this process does not compute on the GPU"


def test_without_a_driver_the_peak_is_that_of_resident_memory_without_that_of_the_program_that_started_this_one():
    large = np.ones(50_000_000)  # 400 MB
    code = "from stages import footprint; print(footprint.peak()); held = bytearray(300_000_000); print(footprint.peak())"
    peaks = list(map(int, subprocess.check_output([sys.executable, "-c", code]).split()))
    assert 290e6 < peaks[1] - peaks[0] < 310e6
    assert peaks[0] < large.nbytes
