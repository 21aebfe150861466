"""Contact sheets: pages of small pictures that show every crop of a project; the parts that a crop cuts away are faded."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from stages.bundled import LETTERING
from stages.text_to_image.imaging.decode import BACKGROUND, ImageError, open_image

COLUMNS, LINES = 8, 5  # pictures on a sheet
CELL = 208  # pixels: the longer side of a picture on a sheet
GAP = 12  # pixels between pictures
LABEL = 52  # pixels below a picture, for its label
FONT = 13  # pixels
LETTERS = 30  # letters on a line of a label
KEPT = 0.25  # share of its colour that a faded part keeps
PAPER, INK, BLANK, FRAME = (255, 255, 255), (30, 30, 30), (225, 225, 225), (214, 39, 40)
QUESTION = """
select images.path, images.width as image_width, images.height as image_height, buckets.*
from buckets join (
    select image_id, min(path) as path, any_value(width) as width, any_value(height) as height
    from images where rejected is null group by image_id
) as images using (image_id)
where buckets.rejected is null order by resolution, crop_loss desc, images.path
"""

Row = Mapping[str, Any]


def draw_sheets(
    rows: Sequence[Row], folder: Path, background: str = BACKGROUND, workers: int = 4
) -> Iterator[tuple[str, Image.Image]]:
    """(file name, sheet), such as "512-2.png", each of one resolution. `rows`: the result of `QUESTION`."""
    with ThreadPoolExecutor(workers) as pool:
        for resolution in dict.fromkeys(row["resolution"] for row in rows):
            own = [row for row in rows if row["resolution"] == resolution]
            for start in range(0, len(own), COLUMNS * LINES):
                some = own[start : start + COLUMNS * LINES]
                pictures = pool.map(lambda row: draw_crop(folder / row["path"], row, background), some)
                yield f"{resolution}-{start // (COLUMNS * LINES) + 1}.png", draw_sheet(list(pictures), list(map(label, some)))


def draw_crop(path: Path, row: Row, background: str = BACKGROUND) -> Image.Image:
    """RGB, the longer side `CELL` pixels, a red frame around the crop. A grey field if the image cannot be decoded."""
    width, height = row["image_width"], row["image_height"]
    scale = CELL / max(width, height)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    try:
        image = open_image(path, background, at_least=CELL).resize(size, Image.Resampling.LANCZOS)
    except ImageError:
        return Image.new("RGB", size, BLANK)
    left, top = row["crop_x"] * scale, row["crop_y"] * scale
    box = (round(left), round(top), round(left + row["crop_w"] * scale), round(top + row["crop_h"] * scale))
    faded = Image.blend(Image.new("RGB", size, PAPER), image, KEPT)
    faded.paste(image.crop(box), box[:2])
    if row["crop_loss"] > 0:
        ImageDraw.Draw(faded).rectangle((box[0], box[1], box[2] - 1, box[3] - 1), outline=FRAME, width=2)
    return faded


def label(row: Row) -> str:
    path = row["path"] if len(row["path"]) <= LETTERS else f"...{row['path'][-LETTERS + 3 :]}"
    facts = f"{row['width']} x {row['height']}, {row['crop_loss']:.0%} cut away"
    # macOS may write "é" as two characters.
    return f"{unicodedata.normalize('NFC', path)}\n{facts}" + (f"\nenlarged {row['scale']:.1f} times" if row["scale"] > 1 else "")


def draw_sheet(pictures: Sequence[Image.Image], labels: Sequence[str]) -> Image.Image:
    lines = -(-len(pictures) // COLUMNS)
    page = Image.new("RGB", (GAP + COLUMNS * (CELL + GAP), GAP + lines * (CELL + LABEL + GAP)), PAPER)
    draw, font = ImageDraw.Draw(page), ImageFont.truetype(LETTERING, FONT)
    for place, (picture, text) in enumerate(zip(pictures, labels, strict=True)):
        left, top = GAP + place % COLUMNS * (CELL + GAP), GAP + place // COLUMNS * (CELL + LABEL + GAP)
        page.paste(picture, (left + (CELL - picture.width) // 2, top + CELL - picture.height))
        draw.text((left, top + CELL + 2), text, INK, font)
    return page
