"""Planted sets for the checks: different pictures, near-duplicates of them, and blurred and badly exposed photographs."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageOps

MATERIAL = Path(__file__).parents[3] / "material" / "images"
TILES = 3  # a real picture gives 3 x 3 different pictures


@cache
def real() -> list[Image.Image]:
    paths = sorted(path for path in MATERIAL.rglob("*") if path.suffix in (".png", ".jpg", ".webp"))
    pictures = []
    for path in paths:
        image = Image.open(path).convert("RGBA")
        pictures.append(Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB"))
    return pictures


@cache
def photographs() -> list[Image.Image]:
    return [Image.open(path).convert("RGB") for path in sorted(MATERIAL.rglob("*")) if path.suffix == ".jpg"]


def scene(seed: int, size: int = 192) -> Image.Image:
    """A drawn picture: a shaded ground, shapes of random place, size and colour, and a texture."""
    generator = np.random.default_rng(seed)
    ground = Image.fromarray(generator.integers(40, 216, (3, 3, 3), dtype=np.uint8)).resize(
        (size, size), Image.Resampling.BICUBIC
    )
    draw = ImageDraw.Draw(ground)
    for _ in range(generator.integers(3, 9)):
        x, y = generator.integers(0, size, 2)
        w, h = generator.integers(size // 10, size // 2, 2)
        shape = draw.ellipse if generator.random() < 0.5 else draw.rectangle
        corners = int(x - w / 2), int(y - h / 2), int(x + w / 2), int(y + h / 2)
        shape(corners, fill=tuple(generator.integers(0, 256, 3).tolist()))
    noise = generator.normal(0, 6, (size, size, 1))
    return Image.fromarray(np.clip(np.asarray(ground) + noise, 0, 255).astype(np.uint8))


def different(count: int) -> Iterator[Image.Image]:
    """Yield `count` different pictures: the real ones, tiles of them that do not overlap, and drawn scenes."""
    made = 0
    for image in real():
        yield image
        made += 1
    for image in photographs():
        w, h = image.width // TILES, image.height // TILES
        for n in range(TILES * TILES):
            x, y = n % TILES * w, n // TILES * h
            yield image.crop((x, y, x + w, y + h))
            made += 1
    for seed in range(count - made):
        yield scene(seed)


def rescaled(image: Image.Image) -> Image.Image:
    return image.resize((max(48, image.width // 2), max(48, image.height // 2)), Image.Resampling.BICUBIC)


def encoded(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=40)
    return Image.open(file).convert("RGB")


def cropped(image: Image.Image, share: float = 0.05, corner: tuple[float, float] = (0.3, 0.8)) -> Image.Image:
    """The picture less 5 % of each side, at an uneven place."""
    x, y = (int(side * share * place) for side, place in zip(image.size, corner, strict=True))
    return image.crop((x, y, x + int(image.width * (1 - share)), y + int(image.height * (1 - share))))


def brighter(image: Image.Image) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(1.25)


def darker(image: Image.Image) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(0.7)


CHANGES = {
    "rescaled": rescaled,
    "encoded": encoded,
    "cropped": cropped,
    "flipped": ImageOps.mirror,
    "brighter": brighter,
    "darker": darker,
}


def blurred(image: Image.Image, radius: float) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(radius * max(image.size) / 512))


def exposed(image: Image.Image, gain: float) -> Image.Image:
    """The photograph with `gain` times the light."""
    light = (np.asarray(image, np.float32) / 255) ** 2.2 * gain
    return Image.fromarray((np.clip(light, 0, 1) ** (1 / 2.2) * 255).astype(np.uint8))
