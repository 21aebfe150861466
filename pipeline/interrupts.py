"""Ctrl-C and SIGTERM end a stage after its current batch."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interruptible(say: Callable[[str], None] = lambda line: None) -> Iterator[threading.Event]:
    """Yield an event that the first signal sets (only in the main thread); a second raises KeyboardInterrupt."""
    stop = threading.Event()

    def handle(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        with _acknowledged(say):
            yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _acknowledged(say: Callable[[str], None]) -> Iterator[None]:
    """Call `say` at the first signal, even while the main thread computes. Needs Python handlers for both signals."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        while number := os.read(reader, 1):
            if number[0] in SIGNALS:
                say("stopping after the current item; a second signal ends at once")
                return

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    # Python runs a handler only when the main thread returns from native code, which may take minutes. The number of the
    # signal arrives in this pipe at once. Only the main thread may set it.
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join()
        os.close(reader)
