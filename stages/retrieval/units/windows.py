"""Cut a text into overlapping windows of lines, for languages that nothing here can parse."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from stages.retrieval.units.unit import Unit


def windows(text: str, size: int) -> Iterator[Unit]:
    """At most `size` lines, each `size // 2` after the one before. Blank windows are left out."""
    lines = text.splitlines()
    step = max(1, size // 2)
    for start in range(0, max(1, len(lines) - size + step), step):
        part = lines[start : start + size]
        code = [line for line in part if line.strip()]
        if not code:
            continue
        first, last = start + 1, start + len(part)
        body = textwrap.dedent("\n".join(part)).strip("\n")
        yield Unit("", f"lines {first} to {last}", "lines", first, last, "", "", body, f"\n{body}", len(code))
