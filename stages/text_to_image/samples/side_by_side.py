"""Previews of several training runs in one picture, for `latentmill compare`: equal prompts and seeds in one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.text_to_image.samples.grid import draw_grid

Key = tuple[str, int, int, int]  # prompt, seed, width, height

MOST = 24  # rows: prompts and seeds that are shown


def draw_side_by_side(runs: Sequence[tuple[str, Mapping[str, int]]], rows: Sequence[Mapping[str, Any]], out: Path) -> Path | None:
    """Draw the previews of several training runs side by side into the PNG file `out`. Return `out`, or None if the
    runs have no preview in common. `runs` holds pairs (heading, adapters). `adapters` maps the `adapter_id` of each of
    the run's adapters to its training step. `rows` are rows of the table `samples`, with an additional key `file` for
    the path of the preview.

    Each row of the picture shows one prompt and seed. All runs have drawn it in the same size. The first column shows
    the base model. Each other column shows the newest preview of one run. At most 24 rows are drawn, all of one image
    size.
    """
    found = [_newest(rows, adapters) for adapters in ({"": 0}, *(adapters for _, adapters in runs))]
    shared = [key for key in found[1] if all(key in drawn for drawn in found[1:])]
    if not shared:
        return None
    size = shared[0][2:]
    keys = sorted(key for key in shared if key[2:] == size)[:MOST]
    steps = [max(drawn[key][0] for key in keys) for drawn in found[1:]]
    heads = ["base", *(f"{name}, step {step}" for (name, _), step in zip(runs, steps, strict=True))]
    cells = [[drawn[key][1] if key in drawn else None for drawn in found] for key in keys]
    out.parent.mkdir(parents=True, exist_ok=True)
    draw_grid(cells, heads, [f"{prompt}\nseed {seed}" for prompt, seed, _, _ in keys], (size[0], size[1])).save(out)
    return out


def _newest(rows: Sequence[Mapping[str, Any]], adapters: Mapping[str, int]) -> dict[Key, tuple[int, Path]]:
    """Return the newest preview for each prompt, seed and size. `rows` are rows of the table `samples`, each a preview,
    with an additional key `file` for the path of the preview. `adapters` maps an `adapter_id` to the training step of
    this adapter. Previews of adapters that are not in `adapters` are ignored. The newest preview is the one of the
    latest step. The result maps (prompt, seed, width, height) to (step, file).
    """
    drawn: dict[Key, tuple[int, Path]] = {}
    for row in rows:
        if row["adapter_id"] in adapters:
            key = (row["prompt"], row["seed"], row["width"], row["height"])
            drawn[key] = max(drawn.get(key, (-1, row["file"])), (adapters[row["adapter_id"]], row["file"]))
    return drawn
