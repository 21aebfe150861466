"""Our decoding of image files beside libvips': `python -m tests.bench.decoding FOLDER`, with pyvips installed.

Every file below FOLDER is decoded by both, turned upright, and laid on white. Of the files that both decode, those within 2
levels of 255 count as equal. Three kinds are counted apart, because programs convert them by rules of their own: files with an
ICC profile, CMYK, and files of more than 8 bits or with signed numbers.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click
import numpy as np

from stages.text_to_image.imaging.decode import ImageError, open_image

LEVELS = 2


def ours(path: Path) -> np.ndarray | str:
    """Return the pixels of a file as our code decodes them, (height, width, 3), or the reason for which it is refused."""
    try:
        return np.asarray(open_image(path, "#ffffff"))
    except ImageError as error:
        return str(error)


def theirs(path: Path) -> tuple[np.ndarray | str, str]:
    """Return (pixels, conversion) of a file as libvips decodes it, or (error message, conversion). The
    conversion is "ICC", "CMYK" or "range" if libvips would have to convert colours, else "".
    """
    pyvips = importlib.import_module("pyvips")
    conversion = ""
    try:
        image = pyvips.Image.new_from_file(str(path), fail_on="error")
        conversion = "ICC" if image.get_typeof("icc-profile-data") else "CMYK" if image.interpretation == "cmyk" else ""
        conversion = conversion or ("range" if image.format != "uchar" else "")
        image = image.autorot()
        if image.hasalpha():
            image = image.flatten(background=[65535 if image.format == "ushort" else 255] * (image.bands - 1))
        pixels = image.colourspace("srgb").cast("uchar").numpy()
    except pyvips.Error as error:
        return (str(error).strip().splitlines() or ["refused"])[0], conversion
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    return (pixels.repeat(3, 2) if pixels.shape[2] == 1 else pixels[..., :3]), conversion


def compare(path: Path) -> tuple[str, str]:
    """Return (result, detail) of one file. The result is "equal", "differs", "only ours", "only theirs" or "both refuse". If its
    colours are converted, the conversion follows, as in "differs, ICC".
    """
    mine, (other, conversion) = ours(path), theirs(path)
    kind = f", {conversion}" if conversion else ""
    if isinstance(mine, str):
        return ("both refuse", "") if isinstance(other, str) else ("only theirs", mine)
    if isinstance(other, str):
        return "only ours", other
    if mine.shape != other.shape:
        return f"differs{kind}", f"{mine.shape} and {other.shape}"
    apart: Any = np.abs(mine.astype(int) - other)
    if apart.max() <= LEVELS:
        return f"equal{kind}", ""
    return (
        f"differs{kind}",
        f"by up to {apart.max()} levels; {(apart.max(-1) > LEVELS).mean():.1%} of the pixels by more than {LEVELS}",
    )


def main(folder: Path) -> None:
    """Compare all files below a folder, and print what differs and the counts."""
    counts: Counter[str] = Counter()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            result, detail = compare(path)
            counts[result] += 1
            if result.startswith(("differs", "only theirs")):
                click.echo(f"{result}: {path.relative_to(folder)}: {detail}")
    plain = counts["equal"] + counts["differs"]
    click.echo(str(dict(counts)))
    click.echo(f"{counts['equal']} of {plain} files without conversion are equal: {counts['equal'] / max(1, plain):.1%}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
