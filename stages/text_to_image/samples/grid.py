"""One image with many previews: the grid of the stage, and previews of several training runs for `latentmill compare`."""

from __future__ import annotations

import hashlib
import json
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from stages.bundled import LETTERING
from stages.run import Run
from stages.text_to_image.samples.config import SamplesConfig
from stages.text_to_image.samples.drawing import save_png

GRID = "grid.png"
CELL = 512  # pixels: the longer side of a picture in the grid
GAP = 8  # pixels between pictures
LABEL = 220  # pixels: width of the rows' labels
HEAD = 36  # pixels: height of the columns' labels
FONT = 16  # pixels
LETTERS = 24  # letters on a line of a row's label
PAPER, INK, BLANK = (255, 255, 255), (30, 30, 30), (225, 225, 225)


def write_grid(
    run: Run[SamplesConfig], columns: Mapping[str, str], wanted: list[dict[str, Any]], paths: Sequence[str | None]
) -> None:
    """Of the first [samples] grid prompts. `columns`: labels by adapter_id. `paths`: the previews of `wanted`, None if absent."""
    first = list(dict.fromkeys(row["caption_id"] for row in wanted))[: run.config.grid]
    rows = [
        (row, run.output.artifacts / (path or "")) for row, path in zip(wanted, paths, strict=True) if row["caption_id"] in first
    ]
    absent = [place for place, (_, file) in enumerate(rows) if not file.is_file()]
    content = hashlib.sha256(json.dumps([*(list(row.values()) for row, _ in rows), *absent]).encode()).hexdigest()
    shown = ""
    with suppress(OSError), Image.open(run.output.artifacts / GRID) as image:
        shown = image.info.get("content", "")
    # The file stays if no row was pending and it already shows the same previews.
    if not rows or (not run.output.pending.num_rows and shown == content):
        return
    labels = {(row["caption_id"], row["seed"]): f"{row['prompt']}\nseed {row['seed']}" for row, _ in rows}
    files = {(row["adapter_id"], row["caption_id"], row["seed"]): file for row, file in rows if file.is_file()}
    cells = [[files.get((adapter_id, *key)) for adapter_id in columns] for key in labels]
    by = run.needs["family"].name
    page = draw_grid(cells, list(columns.values()), list(labels.values()), (run.config.width, run.config.height), by)
    run.output.write(GRID, partial(save_png, image=page, metadata={"content": content} | dict(run.output.provenance)))


def draw_grid(
    cells: Sequence[Sequence[Path | None]], columns: Sequence[str], rows: Sequence[str], size: tuple[int, int], corner: str = ""
) -> Image.Image:
    """`cells[row][column]`: file of a picture, None for a grey field. `size`: of the pictures in pixels, reduced to `CELL`.
    `corner`: the model that drew.
    """
    scale = min(1.0, CELL / max(size))
    width, height = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
    page = Image.new("RGB", (LABEL + len(columns) * (width + GAP), HEAD + len(rows) * (height + GAP)), PAPER)
    draw, font = ImageDraw.Draw(page), ImageFont.truetype(LETTERING, FONT)
    draw.text((GAP, GAP), corner, INK, font)
    for column, label in enumerate(columns):
        draw.text((LABEL + column * (width + GAP), GAP), label, INK, font)
    for row, label in enumerate(rows):
        top = HEAD + row * (height + GAP)
        draw.text((GAP, top), wrap_label(label, height), INK, font)
        for column, path in enumerate(cells[row]):
            picture = Image.new("RGB", (width, height), BLANK)
            if path:
                with Image.open(path) as image:
                    picture = image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
            page.paste(picture, (LABEL + column * (width + GAP), top))
    return page


def wrap_label(text: str, height: int) -> str:
    """As many lines of `LETTERS` letters as fit into `height` pixels, at least one; the last is "..." if lines are left over."""
    room = max(1, height // (FONT + 4))
    text = unicodedata.normalize("NFC", text)  # macOS may write "é" as two characters
    lines = [line for paragraph in text.splitlines() for line in textwrap.wrap(paragraph, LETTERS) or [""]]
    return "\n".join(lines if len(lines) <= room else [*lines[: room - 1], "..."])


Key = tuple[str, int, int, int, str]  # prompt, seed, width, height, family

MOST = 24  # rows: prompts and seeds that are shown


def draw_side_by_side(runs: Sequence[tuple[str, Mapping[str, int]]], rows: Sequence[Mapping[str, Any]], out: Path) -> Path | None:
    """Draw into `out` what all runs drew of the same prompt, seed and size, a column per run; None if nothing is in common.
    `runs`: (heading, training step by adapter_id). `rows`: of `all_samples`, with the path of the preview as `file`.
    """
    found = [_newest(rows, adapters) for adapters in ({"": 0}, *(adapters for _, adapters in runs))]
    shared = [key for key in found[1] if all(key in drawn for drawn in found[1:])]
    if not shared:
        return None
    # A grid has cells of one size: that of the first.
    size = shared[0][2:4]
    keys = sorted(key for key in shared if key[2:4] == size)[:MOST]
    steps = [max(drawn[key][0] for key in keys) for drawn in found[1:]]
    heads = ["base", *(f"{name}, step {step}" for (name, _), step in zip(runs, steps, strict=True))]
    cells = [[drawn[key][1] if key in drawn else None for drawn in found] for key in keys]
    out.parent.mkdir(parents=True, exist_ok=True)
    draw_grid(cells, heads, [f"{prompt}\nseed {seed}\n{family}" for prompt, seed, *_, family in keys], size).save(out)
    return out


def _newest(rows: Sequence[Mapping[str, Any]], adapters: Mapping[str, int]) -> dict[Key, tuple[int, Path]]:
    drawn: dict[Key, tuple[int, Path]] = {}
    for row in rows:
        if row["adapter_id"] in adapters:
            key = (row["prompt"], row["seed"], row["width"], row["height"], row["family"])
            # The preview of the latest step.
            drawn[key] = max(drawn.get(key, (-1, row["file"])), (adapters[row["adapter_id"]], row["file"]))
    return drawn
