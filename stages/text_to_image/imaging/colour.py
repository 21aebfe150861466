"""Convert decoded pixels to 8-bit sRGB: scale the value range, apply the colour profile, composite over a background."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageCms, ImageColor

# White in a mode without a fixed range: the smallest of these values that no pixel exceeds.
INTEGER_WHITES = (255.0, 65535.0, 2147483647.0)
UNSIGNED_WHITES = (255.0, 65535.0, 4294967295.0)
FLOAT_WHITES = (1.0, 255.0, 65535.0)
OVERSHOOT = 1.1  # sharpening takes floats a little beyond white; they are clipped
DARKEST = 0.25  # an image whose largest value is a smaller share of white has another range, or is nearly black
STRIP = 1_000_000  # pixels converted at once, so that a large image is not in memory as float64
SAMPLE_FORMAT = 339  # the TIFF tag: 1 unsigned, 2 signed
BITS = 258  # the TIFF tag: bits per sample


class RangeError(ValueError):
    """The error for an image whose pixel values have no usual range, so that it is unknown which value is white."""


def eight_bit(image: Image.Image) -> Image.Image:
    """Scale a grey image to 8 bits and return it in mode "L". The image may have 16 bits, 32 bits or floats. If one
    grey value is transparent, the result has mode "LA". An image in another mode is returned unchanged. Raises
    RangeError if it is unclear which value is white.

    White is 65535 for unsigned 16 bits. For other modes, it is the smallest usual white (such as FLOAT_WHITES) that
    fits the largest value. Pillow's convert() would clip the values instead of scaling them.
    """
    if not image.mode.startswith(("I", "F")):
        return image
    white = _white(image)
    transparent = image.info.get("transparency")
    grey = Image.new("L", image.size)
    opaque = Image.new("L", image.size) if isinstance(transparent, int) else None  # a PNG may declare one value transparent
    for top, values in _strips(image):
        scaled = np.nan_to_num(np.clip(values / white, 0.0, 1.0), nan=0.0)
        grey.paste(Image.fromarray(np.rint(scaled * 255.0).astype(np.uint8)), (0, top))
        if opaque:
            opaque.paste(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)), (0, top))
    if opaque:
        grey.putalpha(opaque)
    if "icc_profile" in image.info:
        grey.info["icc_profile"] = image.info["icc_profile"]
    return grey


def check_range(image: Image.Image) -> None:
    """Raise RangeError if it is unclear which pixel value of a grey `image` is white. This can happen only in the
    Pillow modes "I" and "F". Colour images and 8-bit images are accepted without a check.
    """
    if image.mode.startswith(("I", "F")):
        _white(image)


def _white(image: Image.Image) -> float:
    """Return the pixel value that stands for white in a grey image of 16 bits, 32 bits or floats. It is 65535 for
    unsigned 16 bits. Otherwise, the pixel values decide between a few usual whites, such as 1, 255 and 65535 for
    floats. Raises RangeError if the pixel values do not tell which white is meant.

    Of the usual whites, the smallest is taken that is not below the largest pixel value. Floats may exceed white a
    little.
    """
    if image.mode not in ("I", "F") or (image.mode == "I" and image.format == "PPM"):  # Pillow scales a PPM to 16 bits
        return 65535.0
    is_float = image.mode == "F"
    whites: tuple[float, ...] = FLOAT_WHITES if is_float else UNSIGNED_WHITES if _is_unsigned(image) else INTEGER_WHITES
    if _tag(image, BITS) == 16:  # signed, because unsigned 16 bits have a mode of their own
        whites = (255.0, 32767.0)
    low, high = math.inf, -math.inf
    for _, values in _strips(image):
        low, high = min(low, float(np.nanmin(values, initial=0.0))), max(high, float(np.nanmax(values, initial=0.0)))
    over = OVERSHOOT if is_float else 1.0
    white = next((white for white in whites if high <= over * white), math.inf)
    if white == math.inf or (white > whites[0] and high < DARKEST * white) or low < (1.0 - over) * white:
        usual = ", ".join(f"{each:g}" for each in whites)
        raise RangeError(
            f"the pixels have values from {low:g} to {high:g}, and white is unclear (0 to {usual} are known): "
            "save it with 8 or 16 bits per channel"
        )
    return white


def _strips(image: Image.Image) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (row, values) for each horizontal strip of a grey image, from top to bottom. `row` is the number of the
    strip's first row, counted from 0. `values` is a float64 array of shape `(rows, width)`. A strip has about `STRIP`
    pixels.
    """
    unsigned = image.mode == "I" and _is_unsigned(image)
    rows = max(1, STRIP // max(1, image.width))
    for top in range(0, image.height, rows):
        strip = np.asarray(image.crop((0, top, image.width, min(top + rows, image.height))))
        yield top, (strip.view(np.uint32) if unsigned else strip).astype(np.float64)


def _is_unsigned(image: Image.Image) -> bool:
    """Return True if the whole numbers of a TIFF image are unsigned. Pillow reads them as signed 32-bit numbers."""
    return image.format == "TIFF" and _tag(image, SAMPLE_FORMAT) in (None, 1)


def _tag(image: Image.Image, number: int) -> int | None:
    """Return the value of the TIFF tag `number` of an image. Of several values, the first is returned. Return None if
    the value is not an integer, if the image has no such tag, or if it is not a TIFF image.
    """
    value = getattr(image, "tag_v2", {}).get(number)
    first = value[0] if isinstance(value, tuple) and value else value
    return first if isinstance(first, int) else None


def to_srgb(image: Image.Image) -> Image.Image:
    """Convert an 8-bit image of any mode to sRGB. If it has transparency, return it in mode "RGBA", otherwise in mode
    "RGB". The image's own colour profile is applied. If the profile is broken or does not fit the mode, it is ignored.
    """
    profile = image.info.get("icc_profile")
    if image.mode == "LAB":
        return _convert(image, ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        alpha = image.getchannel("A")
        colour = _apply_profile(image.convert("RGB"), profile)
        colour.putalpha(alpha)
        return colour
    if image.mode not in ("RGB", "L", "CMYK"):
        image = image.convert("L" if image.mode == "1" else "RGB")
    return _apply_profile(image, profile)


def _apply_profile(image: Image.Image, profile: bytes | None) -> Image.Image:
    if not profile:
        return image.convert("RGB")
    try:
        return _convert(image, ImageCms.ImageCmsProfile(io.BytesIO(profile)))
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return image.convert("RGB")


def _convert(image: Image.Image, profile: ImageCms.ImageCmsProfile) -> Image.Image:
    """Convert an image from the colours of `profile` to sRGB and return it in mode "RGB". The rendering intent is
    relative colorimetric, with black point compensation (black maps to black). Raises ImageCms.PyCMSError if `profile`
    does not fit the image's mode.
    """
    converted = ImageCms.profileToProfile(
        image,
        profile,
        ImageCms.createProfile("sRGB"),
        renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
        outputMode="RGB",
        flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
    )
    assert converted is not None
    return converted


def composite(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """Blend the transparent pixels of an image with a background colour, and return it in mode "RGB". `background` is
    red, green and blue, 0 to 255. An image whose mode is not "RGBA" is only converted to "RGB".
    """
    if image.mode != "RGBA":
        return image if image.mode == "RGB" else image.convert("RGB")
    base = Image.new("RGBA", image.size, (*background, 255))
    return Image.alpha_composite(base, image).convert("RGB")


def parse_colour(text: str) -> tuple[int, int, int]:
    """Return the red, green and blue (0 to 255) of a colour such as "#ffffff" or "white". Raises ValueError if `text` is
    not a colour. The message names the setting "background".
    """
    try:
        red, green, blue = ImageColor.getrgb(text)[:3]
    except ValueError:
        raise ValueError(f'background must be a colour, such as "#ffffff" or "white", got "{text}"') from None
    return red, green, blue
