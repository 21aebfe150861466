"""The training log: one JSON object per line, in the work folder and on the terminal."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

LOG = logging.getLogger("micro")


class Journal:
    """Appends lines to a file. A resumed training appends to the file of its first call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.started = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def minutes(self) -> float:
        """Minutes since this object was made."""
        return (time.monotonic() - self.started) / 60

    def note(self, what: str, **numbers: Any) -> None:
        """Write one line to the log. `what` is its subject. `numbers` are values by name. The seconds since the start are
        added as `at_s`.
        """
        line = json.dumps({"about": what, "at_s": round(60 * self.minutes, 1), **numbers}, ensure_ascii=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        LOG.info(line)
