"""Which mask each image has: its alpha channel, a file, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pyarrow as pa

from stages.hashing import file_sha256
from stages.text_to_image.imaging.decode import MAX_BYTES
from stages.text_to_image.imaging.masks import mask_finder
from stages.text_to_image.imaging.usable import usable_paths, usable_rows
from stages.untrusted import open_regular

ALPHA = "alpha"  # the mask_id of an image's own alpha channel: the image_id covers its content
MAY_HIDE_ALPHA = ("PNG", "GIF", "WEBP")  # formats with transparent pixels even in modes without an alpha channel


def mask_ids(images: pa.Table, folder: Path, mask: Literal["none", "alpha", "file"]) -> dict[str, str]:
    """mask_id of every usable image, references included: the sha256 of its mask file, "alpha", or "" for no mask.

    Raises ValueError if no image is usable, if a mask file cannot be read, or if files are asked for and there is none.
    """
    usable = usable_rows(images, references=True)
    if mask == "none":
        return {row["image_id"]: "" for row in usable}
    if mask == "alpha":
        return {row["image_id"]: ALPHA if _may_have_alpha(row["mode"], row["format"]) else "" for row in usable}
    files = mask_files(usable_paths(images), folder)
    if not files:
        name = Path(usable[0]["path"]).stem
        raise ValueError(
            f'latents.mask is "file", but none of the {len(usable)} images has a mask file: for {usable[0]["path"]}, '
            f"write {name}.mask.png beside it, or masks/{name}.png"
        )
    return {row["image_id"]: _sha256(files[row["image_id"]]) if row["image_id"] in files else "" for row in usable}


def mask_files(paths: dict[str, list[str]], folder: Path) -> dict[str, Path]:
    """Mask file by image_id: cat.mask.png or masks/cat.png for cat.jpg. Images without one are left out."""
    find = mask_finder(folder)
    return {image_id: folder / path for image_id, names in paths.items() if (path := find(names))}


def _may_have_alpha(mode: str, form: str) -> bool:
    return "A" in mode.upper() or form in MAY_HIDE_ALPHA


def _sha256(path: Path) -> str:
    try:
        with open_regular(path, MAX_BYTES) as file:
            return file_sha256(file)
    except OSError as error:
        raise ValueError(f"the mask {path} cannot be read: {error.strerror or error}") from error
