"""The grid: one image with all previews. It has a row per prompt and seed, and a column per source."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from stages.run import Run
from stages.text_to_image.samples.config import SamplesConfig
from stages.text_to_image.samples.decoding import save_png
from stages.text_to_image.samples.sources import SampleSource

GRID = "grid.png"
CELL = 512  # pixels: the longer side of a picture in the grid
GAP = 8  # pixels between pictures
LABEL = 220  # pixels: width of the rows' labels
HEAD = 36  # pixels: height of the columns' labels
FONT = 16  # pixels
LETTERS = 24  # letters on a line of a row's label
PAPER, INK, BLANK = (255, 255, 255), (30, 30, 30), (225, 225, 225)


def write_grid(
    run: Run[SamplesConfig], sources: list[SampleSource], wanted: list[dict[str, Any]], paths: Sequence[str | None]
) -> None:
    """Write the grid of the first [samples] grid prompts. `paths[i]`: the preview of `wanted[i]`, None if it does not
    exist yet.
    """
    first = list(dict.fromkeys(row["caption_id"] for row in wanted))[: run.config.grid]
    rows = [(row, path) for row, path in zip(wanted, paths, strict=True) if row["caption_id"] in first]
    content = hashlib.sha256(json.dumps([list(row.values()) for row, _ in rows]).encode()).hexdigest()
    # The file stays if no row was pending and it already shows the same rows.
    if not rows or (not run.output.pending.num_rows and grid_content(run.output.artifacts / GRID) == content):
        return
    labels = {(row["caption_id"], row["seed"]): f"{row['prompt']}\nseed {row['seed']}" for row, _ in rows}
    files = {(row["adapter_id"], row["caption_id"], row["seed"]): run.output.artifacts / path for row, path in rows if path}
    existing = {key: file for key, file in files.items() if file.exists()}
    cells = [[existing.get((source.adapter_id, *key)) for source in sources] for key in labels]
    page = draw_grid(cells, [one.label for one in sources], list(labels.values()), (run.config.width, run.config.height))
    run.output.write(GRID, partial(save_png, image=page, metadata={"content": content} | dict(run.output.provenance)))


def grid_content(path: Path) -> str:
    """sha256 of the rows that a grid shows, from its text chunk "content"; "" if it has none or cannot be read."""
    try:
        with Image.open(path) as image:
            return str(image.info.get("content", ""))
    except OSError:
        return ""


def draw_grid(
    cells: Sequence[Sequence[Path | None]], columns: Sequence[str], rows: Sequence[str], size: tuple[int, int]
) -> Image.Image:
    """`cells[row][column]`: file of a picture, None for a grey field. `size`: of the pictures in pixels, reduced to `CELL`."""
    scale = min(1.0, CELL / max(size))
    width, height = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
    page = Image.new("RGB", (LABEL + len(columns) * (width + GAP), HEAD + len(rows) * (height + GAP)), PAPER)
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(FONT)
    for column, label in enumerate(columns):
        draw.text((LABEL + column * (width + GAP), GAP), label, INK, font)
    for row, label in enumerate(rows):
        top = HEAD + row * (height + GAP)
        draw.text((GAP, top), wrap_label(label, height), INK, font)
        for column, path in enumerate(cells[row]):
            page.paste(open_picture(path, (width, height)), (LABEL + column * (width + GAP), top))
    return page


def open_picture(path: Path | None, size: tuple[int, int]) -> Image.Image:
    if path is None:
        return Image.new("RGB", size, BLANK)
    with Image.open(path) as image:
        return image.convert("RGB").resize(size, Image.Resampling.LANCZOS)


def wrap_label(text: str, height: int) -> str:
    """As many lines of `LETTERS` letters as fit into `height` pixels, at least one; the last is "..." if lines are left over."""
    room = max(1, height // (FONT + 4))
    lines = [line for paragraph in text.splitlines() for line in textwrap.wrap(paragraph, LETTERS) or [""]]
    return "\n".join(lines if len(lines) <= room else [*lines[: room - 1], "..."])
