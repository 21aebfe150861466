"""Pictures of the experiments side by side: a row for each who drew, a column for each subject or seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

SIDE, GAP, LABEL = 78, 4, 104  # pixels: a picture, between two, the rows' labels
COLORS = 112  # of the file
PAPER, INK = (255, 255, 255), (32, 36, 42)

Row = dict[str, Any]
Line = tuple[str, list[Path]]  # a label, and its pictures


def strip(rows: Sequence[Row], out: Path) -> None:
    """The strips: dropout-pictures.png, sizes-pictures.png, preservation-pictures.png."""
    who = {"base": "base", "dropout 0": "dropout 0", "plain": "dropout 0.1", "dropout 0.5": "dropout 0.5"}
    who |= {"preserved, dropout 0": "preservation,\ndropout 0", "preserved": "preservation,\ndropout 0.1"}
    page([(name, chosen(rows, run, "empty", 3.0, 128)) for run, name in who.items()], out / "dropout-pictures.png")
    names = {"base": "base", "plain": "trained at 128", "two sizes": "at 128 and 192"}
    page([(name, chosen(rows, run, "trigger", 3.0, 192)[:6]) for run, name in names.items()], out / "sizes-pictures.png")
    named = {"base": "base", "plain": "without", "preserved": "with"}
    kinds = {"none": "no trigger:\n", "trigger": "trigger:\n"}
    lines = [(said + name, chosen(rows, run, kind, 3.0, 128)[:6]) for kind, said in kinds.items() for run, name in named.items()]
    page(lines, out / "preservation-pictures.png")


def chosen(rows: Sequence[Row], run: str, kind: str, guidance: float, side: int) -> list[Path]:
    """The pictures of one who drew."""
    asked = (run, kind, guidance, side)
    return [Path(row["path"]) for row in rows if (row["run"], row["kind"], row["guidance"], row["side"]) == asked]


def page(lines: Sequence[Line], file: Path) -> None:
    """Rows of pictures in a PNG."""
    width = LABEL + max(len(files) for _, files in lines) * (SIDE + GAP)
    sheet = Image.new("RGB", (width, len(lines) * (SIDE + GAP) - GAP), PAPER)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    for number, (label, files) in enumerate(lines):
        top = number * (SIDE + GAP)
        pen.multiline_text((0, top + SIDE / 2), label, INK, font, anchor="lm", spacing=2)
        for place, path in enumerate(files):
            with Image.open(path) as image:
                shown = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS)
            sheet.paste(shown, (LABEL + place * (SIDE + GAP), top))
    sheet.quantize(COLORS, dither=Image.Dither.NONE).save(file, optimize=True)
