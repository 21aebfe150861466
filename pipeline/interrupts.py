"""Lets Ctrl-C and SIGTERM end a stage after its current batch."""

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
    """Let a `with` block end early on Ctrl-C or SIGTERM. The block gets a `threading.Event`. The first signal sets the
    event. The block should then stop after its current batch. The first signal also calls `say` with one line for the
    user. A second signal raises KeyboardInterrupt.

    `say` is called even while the main thread computes. Outside the main thread, the handling of signals is unchanged,
    and the event is never set.
    """
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
    """Call `say` with one line for the user at the first Ctrl-C or SIGTERM during a `with` block. Another thread calls
    `say`, so that the line comes while the main thread computes. The block must run in the main thread. The caller must
    first set Python handlers for both signals.

    Python runs a handler only when the main thread returns from native code. This may take minutes. The number of the
    signal is therefore written to a pipe at once, and the other thread reads the pipe.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        while number := os.read(reader, 1):
            if number[0] in SIGNALS:
                say("stopping after the current item; a second signal ends at once")
                return

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join()
        os.close(reader)
