"""Memory and seconds of loading a large model: as MLX counts them, and as the system counts the process."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from stages.footprint import peak_resident
from stages.text_to_image import weights

Row = dict[str, Any]


class Meter:
    """Records the peak memory of this process, in GB, and the time and memory of loading models."""

    def __init__(self) -> None:
        self.peak = 0
        self.copying = 0.0  # seconds of writing a converted copy

    def highest(self) -> float:
        """MLX's, in GB; peaks before a load are included."""
        self.peak = max(self.peak, mx.get_peak_memory())
        return round(self.peak / 1e9, 2)

    def timed(self, load: Callable[..., Any], into: Row) -> Callable[..., Any]:
        """Seconds and peak memory of a call of `load` go into the row `into`."""

        @functools.wraps(load)
        def measured(*given: Any, **named: Any) -> Any:
            self.highest()
            before, began = mx.get_active_memory(), time.perf_counter()
            self.copying = 0.0
            mx.reset_peak_memory()
            model = load(*given, **named)
            evaluate(model)
            seconds = time.perf_counter() - began - self.copying
            into.update(
                load_s=round(seconds, 2),
                copy_s=round(self.copying, 2),
                loaded_gb=round((mx.get_active_memory() - before) / 1e9, 2),
                load_peak_gb=round((mx.get_peak_memory() - before) / 1e9, 2),
                cache_gb=round(mx.get_cache_memory() / 1e9, 2),
                process_after_load_gb=process_peak(),
            )
            return model

        return measured

    def count_copying(self) -> None:
        write = weights._write

        def measured(*given: Any) -> None:
            began = time.perf_counter()
            write(*given)
            self.copying += time.perf_counter() - began

        weights._write = measured  # type: ignore[assignment]


def evaluate(model: Any) -> None:
    model = getattr(model, "model", model)  # of an encoder or a sampler
    if hasattr(model, "blocks"):
        mx.eval(model.top, [block.weights for block in model.blocks])


def process_peak() -> float:
    """GB."""
    return round(peak_resident() / 1e9, 2)


class OwnMemory:
    """Memory of this process without mapped files, in GB, read every 10 ms: at the start of the block, and the largest."""

    def __enter__(self) -> OwnMemory:
        self.before = self.peak = own_gb()
        self._ended = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._reader.join()

    def _read(self) -> None:
        while not self._ended.wait(0.01):
            self.peak = max(self.peak, own_gb())


def own_gb() -> float:
    return round(anonymous_memory() / 1e9, 2)


def anonymous_memory() -> int:
    """Of this process, without mapped files: bytes, or 0 where the system does not report it (macOS)."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("RssAnon")) * 1024
