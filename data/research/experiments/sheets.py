"""Draw sheets of previews for the page of the experiments: one row of pictures per run, one column per subject or seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

SIDE, GAP, LABEL_WIDTH = 78, 4, 104  # pixels: a picture, the gap between two, the labels of the rows
COLORS = 112  # of the PNG
PAPER, INK = (255, 255, 255), (32, 36, 42)

Row = dict[str, Any]
Line = tuple[str, list[Path]]  # a label, and the pictures beside it


def write_sheets(rows: Sequence[Row], out: Path) -> None:
    """Write dropout-pictures.png, sizes-pictures.png and preservation-pictures.png from preview rows with their files."""
    runs = {"base": "base", "dropout 0": "dropout 0", "plain": "dropout 0.1", "dropout 0.5": "dropout 0.5"}
    runs |= {"preserved, dropout 0": "preservation,\ndropout 0", "preserved": "preservation,\ndropout 0.1"}
    lines = [(label, pictures(rows, run, "empty", 128)) for run, label in runs.items()]
    write_sheet(lines, out / "dropout-pictures.png")
    runs = {"base": "base", "plain": "trained at 128", "two sizes": "at 128 and 192"}
    lines = [(label, pictures(rows, run, "trigger", 192)[:6]) for run, label in runs.items()]
    write_sheet(lines, out / "sizes-pictures.png")
    runs = {"base": "base", "plain": "without", "preserved": "with"}
    kinds = {"none": "no trigger:\n", "trigger": "trigger:\n"}
    lines = [
        (prefix + label, pictures(rows, run, kind, 128)[:6]) for kind, prefix in kinds.items() for run, label in runs.items()
    ]
    write_sheet(lines, out / "preservation-pictures.png")


def pictures(rows: Sequence[Row], run: str, kind: str, side: int) -> list[Path]:
    """Return the files of a run's previews of one kind of prompt. Only previews drawn at guidance 3 and with a side of
    `side` pixels count. `rows` are the rows of all previews.
    """
    wanted = (run, kind, 3.0, side)
    return [Path(row["path"]) for row in rows if (row["run"], row["kind"], row["guidance"], row["side"]) == wanted]


def write_sheet(lines: Sequence[Line], file: Path) -> None:
    """Write labelled rows of pictures as a PNG."""
    width = LABEL_WIDTH + max(len(files) for _, files in lines) * (SIDE + GAP)
    sheet = Image.new("RGB", (width, len(lines) * (SIDE + GAP) - GAP), PAPER)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    for number, (label, files) in enumerate(lines):
        top = number * (SIDE + GAP)
        pen.multiline_text((0, top + SIDE / 2), label, INK, font, anchor="lm", spacing=2)
        for place, path in enumerate(files):
            with Image.open(path) as image:
                small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS)
            sheet.paste(small, (LABEL_WIDTH + place * (SIDE + GAP), top))
    sheet.quantize(COLORS, dither=Image.Dither.NONE).save(file, optimize=True)
