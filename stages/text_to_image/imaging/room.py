"""A bound on the pixels that threads decode at the same time, so that a few huge images do not fill the memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Room:
    """At most `pixels` are taken at once; a larger image waits until it is alone."""

    def __init__(self, pixels: int) -> None:
        self.pixels = pixels
        self._used = 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, pixels: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + pixels <= self.pixels)
            self._used += pixels
        try:
            yield
        finally:
            with self._changed:
                self._used -= pixels
                self._changed.notify_all()


ROOM = Room(100_000_000)  # in a decoded image a pixel takes 4 to 12 bytes: about 1 GB in all
