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

from stages.stage import StageContext
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


def write_grid(ctx: StageContext, sources: list[SampleSource], wanted: list[dict[str, Any]], paths: Sequence[str | None]) -> None:
    """Write `grid.png`: a table of previews with one column per source and one row per prompt and seed. `ctx` is the
    stage's context: its tables and settings. `sources` are the models that draw, the base or an adapter. `wanted` holds
    the rows of the table `samples` that should exist, as dicts. `paths[i]` is the preview of `wanted[i]`, relative to
    the folder `ctx.artifacts`. It is None if the preview does not exist yet. A missing preview becomes a grey field.

    Only the first `samples.grid` prompts are shown. Nothing is written if there is no row to show. The file also stays
    as it is if no row is pending and it already shows the same rows.
    """
    first = list(dict.fromkeys(row["caption_id"] for row in wanted))[: ctx.config.grid]
    rows = [(row, path) for row, path in zip(wanted, paths, strict=True) if row["caption_id"] in first]
    content = hashlib.sha256(json.dumps([list(row.values()) for row, _ in rows]).encode()).hexdigest()
    if not rows or (not ctx.pending.num_rows and grid_content(ctx.artifacts / GRID) == content):
        return
    labels = {(row["caption_id"], row["seed"]): f"{row['prompt']}\nseed {row['seed']}" for row, _ in rows}
    files = {(row["adapter_id"], row["caption_id"], row["seed"]): ctx.artifacts / path for row, path in rows if path}
    existing = {key: file for key, file in files.items() if file.exists()}
    cells = [[existing.get((source.adapter_id, *key)) for source in sources] for key in labels]
    page = draw_grid(cells, [one.label for one in sources], list(labels.values()), (ctx.config.width, ctx.config.height))
    ctx.write_artifact(GRID, partial(save_png, image=page, metadata={"content": content} | ctx.provenance))


def grid_content(path: Path) -> str:
    """Return the hash that `write_grid` stored in a grid of previews. `path` is the PNG file of the grid. The hash is
    the sha256 of the rows of the table `samples` that the grid shows, in hex digits. Return "" if the file is missing,
    cannot be read or has no such hash.

    The hash is the text chunk "content" of the PNG file.
    """
    try:
        with Image.open(path) as image:
            return str(image.info.get("content", ""))
    except OSError:
        return ""


def draw_grid(
    cells: Sequence[Sequence[Path | None]], columns: Sequence[str], rows: Sequence[str], size: tuple[int, int]
) -> Image.Image:
    """Return one picture that shows pictures as a table with labels. `cells[row][column]` is the file of a picture. None
    stands for a grey field. `columns` and `rows` are the labels. `size` is the width and height of the pictures in
    pixels. If the longer side exceeds 512, the pictures are shrunk.
    """
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
    """Return the picture at `path` in mode "RGB", resized to `size`. `size` is its width and height in pixels. A `path`
    of None gives a grey field.
    """
    if path is None:
        return Image.new("RGB", size, BLANK)
    with Image.open(path) as image:
        return image.convert("RGB").resize(size, Image.Resampling.LANCZOS)


def wrap_label(text: str, height: int) -> str:
    """Wrap the text of a label into lines of at most 24 letters. As many lines are returned as fit into `height` pixels,
    but at least one. If lines are left over, the last line is "...".
    """
    room = max(1, height // (FONT + 4))
    lines = [line for paragraph in text.splitlines() for line in textwrap.wrap(paragraph, LETTERS) or [""]]
    return "\n".join(lines if len(lines) <= room else [*lines[: room - 1], "..."])
