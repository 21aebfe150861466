"""A bound on the pixels that threads decode at the same time, so that a few huge images do not fill the memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Room:
    """A limit on the number of pixels that threads decode at the same time. `pixels` is the limit. A thread reserves
    its pixels with `with room.taken(n):`.
    """

    def __init__(self, pixels: int) -> None:
        self.pixels = pixels
        self._used = 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, pixels: int) -> Iterator[None]:
        """Return a context manager that reserves `pixels` pixels. It waits until that many are free, and releases them
        at the end of the `with` block. If `pixels` exceeds the limit, it waits until nothing else is reserved.
        """
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
