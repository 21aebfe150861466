"""Reference images for drawing: read, cut to size as diffusers does, and encoded."""

from __future__ import annotations

import difflib
import hashlib
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from PIL import Image

from stages.text_to_image.imaging.decode import CEILING_BYTES, ImageError, open_image
from stages.untrusted import read_bytes

if TYPE_CHECKING:
    from stages.models.protocols import Autoencoder

MOST = 1024 * 1024  # pixels of a reference; a larger one is reduced
MULTIPLE = 16  # pixels: widths and heights are multiples of this
SHORTEST, LONGEST = 64, 8  # the shorter side in pixels, and the largest aspect ratio that diffusers takes


def read_reference(file: Path) -> Image.Image:
    """Read a reference image from `file` and return it. The image is upright and has the mode RGB. Transparent pixels
    become white. Raises ValueError if the file cannot be read. Raises it too if a side is shorter than 64 pixels, or if
    the longer side is more than 8 times the shorter.
    """
    try:
        image = open_image(io.BytesIO(read_bytes(file, CEILING_BYTES)), "#ffffff")
    except ImageError as error:
        raise ValueError(f"the reference {file} cannot be used: {error.detail}") from None
    short, long = sorted(image.size)
    if short < SHORTEST or long > LONGEST * short:
        raise ValueError(
            f"the reference {file} must have sides of at least {SHORTEST} pixels and an aspect ratio of at most {LONGEST}, "
            f"got {image.width} x {image.height}"
        )
    return image


def references_by_prompt(
    prompts: Iterable[str], usual: Sequence[str], special: Mapping[str, Sequence[str]], trigger: str
) -> dict[str, tuple[str, ...]]:
    """Return a dict from each preview prompt to the paths of its reference images, a tuple. `prompts` are the preview
    prompts. `special` maps some of these prompts to paths. In its keys, {trigger} stands for the word `trigger`. All
    other prompts get the paths `usual`. Paths are returned as they are given. Raises ValueError if a key of `special`
    is not in `prompts`.
    """
    found = {prompt: tuple(usual) for prompt in prompts}
    for key, paths in special.items():
        prompt = key.replace("{trigger}", trigger)
        if prompt not in found:
            near = difflib.get_close_matches(prompt, found, 1)
            hint = f'; did you mean "{near[0]}"?' if near else ""
            raise ValueError(f'samples.prompt_references must name prompts of [captions] preview_prompts, got "{key}"{hint}')
        found[prompt] = tuple(paths)
    return found


def reference_id(files: Sequence[Path]) -> str | None:
    """Return a text that identifies reference images by their content. It is the sha256 of each file, joined by "+".
    Return None if `files` is empty. Raises ValueError if a file cannot be read.
    """
    try:
        return "+".join(hashlib.sha256(read_bytes(file, CEILING_BYTES)).hexdigest() for file in files) or None
    except ValueError as error:
        raise ValueError(f"the reference {error}") from None


def cut_reference(image: Image.Image) -> Image.Image:
    """Return `image` in a size that the model can take: both sides are multiples of 16 pixels. First, an image of more
    than 1024 x 1024 pixels is reduced to this area. Then the edges are cut off evenly.
    """
    if image.width * image.height > MOST:
        scale = math.sqrt(MOST / (image.width * image.height))
        image = image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.LANCZOS)
    width, height = (side // MULTIPLE * MULTIPLE for side in image.size)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def encode_references(autoencoder: Autoencoder, images: Iterable[Image.Image]) -> list[mx.array]:
    """Return the latents of reference images. A latent is an image as the autoencoder encodes it. There is one float32
    array per image, of the shape (1, channels, height / 16, width / 16). Height and width are those after
    `cut_reference`. `images` are PIL images of any size in mode RGB.
    """
    found = []
    for image in images:
        pixels_1HWC = mx.array(np.asarray(cut_reference(image)))[None].astype(mx.float32) / 127.5 - 1.0
        found.append(autoencoder.encode(pixels_1HWC).astype(mx.float32))
        mx.eval(found[-1])
    return found
