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
    from stages.models.family import Autoencoder

MOST = 1024 * 1024  # pixels of a reference; a larger one is reduced
MULTIPLE = 16  # pixels: widths and heights are multiples of this
SHORTEST, LONGEST = 64, 8  # the shorter side in pixels, and the largest aspect ratio that diffusers takes


def read_reference(file: Path) -> Image.Image:
    """Upright and RGB, transparent pixels white. Raises ValueError if the file cannot be read, or its shape is one that
    diffusers refuses.
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
    """Paths by prompt: those of `special`, whose keys may have {trigger}, else `usual`. Raises ValueError if a key is no
    prompt.
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
    """sha256 of each file, joined by "+"; None without files. Raises ValueError if a file cannot be read."""
    try:
        return "+".join(hashlib.sha256(read_bytes(file, CEILING_BYTES)).hexdigest() for file in files) or None
    except ValueError as error:
        raise ValueError(f"the reference {error}") from None


def cut_reference(image: Image.Image) -> Image.Image:
    """Reduced to an area of at most `MOST`, then cut evenly to sides that are multiples of 16 pixels."""
    if image.width * image.height > MOST:
        scale = math.sqrt(MOST / (image.width * image.height))
        image = image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.LANCZOS)
    width, height = (side // MULTIPLE * MULTIPLE for side in image.size)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def encode_references(autoencoder: Autoencoder, images: Iterable[Image.Image]) -> list[mx.array]:
    """One float32 latent (1, channels, height / 16, width / 16) per image, of its size after `cut_reference`."""
    found = []
    for image in images:
        pixels_1HWC = mx.array(np.asarray(cut_reference(image)))[None].astype(mx.float32) / 127.5 - 1.0
        found.append(autoencoder.encode(pixels_1HWC).astype(mx.float32))
        # MLX is lazy: without this, the work of all encodings would wait and run together.
        mx.eval(found[-1])
    return found
