"""Previews of several training runs in one picture, for `latentmill compare`: equal prompts and seeds in one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.text_to_image.samples.grid import draw_grid

Key = tuple[str, int, int, int]  # prompt, seed, width, height

MOST = 24  # rows: prompts and seeds that are shown


def draw_side_by_side(runs: Sequence[tuple[str, Mapping[str, int]]], rows: Sequence[Mapping[str, Any]], out: Path) -> Path | None:
    """Draw into `out` what all runs drew of the same prompt, seed and size, a column per run; None if there is nothing in common.

    `runs`: (heading, training step by adapter_id). `rows`: of the table `samples`, with the path of the preview as `file`.
    """
    found = [_newest(rows, adapters) for adapters in ({"": 0}, *(adapters for _, adapters in runs))]
    shared = [key for key in found[1] if all(key in drawn for drawn in found[1:])]
    if not shared:
        return None
    # A grid has cells of one size: that of the first.
    size = shared[0][2:]
    keys = sorted(key for key in shared if key[2:] == size)[:MOST]
    steps = [max(drawn[key][0] for key in keys) for drawn in found[1:]]
    heads = ["base", *(f"{name}, step {step}" for (name, _), step in zip(runs, steps, strict=True))]
    cells = [[drawn[key][1] if key in drawn else None for drawn in found] for key in keys]
    out.parent.mkdir(parents=True, exist_ok=True)
    draw_grid(cells, heads, [f"{prompt}\nseed {seed}" for prompt, seed, _, _ in keys], (size[0], size[1])).save(out)
    return out


def _newest(rows: Sequence[Mapping[str, Any]], adapters: Mapping[str, int]) -> dict[Key, tuple[int, Path]]:
    drawn: dict[Key, tuple[int, Path]] = {}
    for row in rows:
        if row["adapter_id"] in adapters:
            key = (row["prompt"], row["seed"], row["width"], row["height"])
            # The preview of the latest step.
            drawn[key] = max(drawn.get(key, (-1, row["file"])), (adapters[row["adapter_id"]], row["file"]))
    return drawn
