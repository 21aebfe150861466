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
    """It is unknown which pixel value is white."""


def eight_bit(image: Image.Image) -> Image.Image:
    """Grey of 16 bits, 32 bits or floats becomes "L", or "LA" if one value is transparent. Other modes stay."""
    if not image.mode.startswith(("I", "F")):
        return image
    # Pillow's convert("L") would clip the values at 255, not scale them.
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
    """Raise RangeError if it is unclear which value of a grey image is white: only in the modes "I" and "F"."""
    if image.mode.startswith(("I", "F")):
        _white(image)


def _white(image: Image.Image) -> float:
    """65535 for unsigned 16 bits; else the smallest usual white that no pixel exceeds. Raises RangeError if that is unclear."""
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
    """(first row, float64 (rows, width)), from the top."""
    unsigned = image.mode == "I" and _is_unsigned(image)
    rows = max(1, STRIP // max(1, image.width))
    for top in range(0, image.height, rows):
        strip = np.asarray(image.crop((0, top, image.width, min(top + rows, image.height))))
        yield top, (strip.view(np.uint32) if unsigned else strip).astype(np.float64)


def _is_unsigned(image: Image.Image) -> bool:
    """Pillow reads the unsigned integers of a TIFF as signed."""
    return image.format == "TIFF" and _tag(image, SAMPLE_FORMAT) in (None, 1)


def _tag(image: Image.Image, number: int) -> int | None:
    """The first value of a TIFF tag, if it is an integer."""
    value = getattr(image, "tag_v2", {}).get(number)
    first = value[0] if isinstance(value, tuple) and value else value
    return first if isinstance(first, int) else None


def to_srgb(image: Image.Image) -> Image.Image:
    """Any 8-bit mode to "RGB", or "RGBA" if it has transparency. A profile that is broken or does not fit the mode is ignored."""
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
    """Blend an "RGBA" image over the background. Others become "RGB"."""
    if image.mode != "RGBA":
        return image if image.mode == "RGB" else image.convert("RGB")
    base = Image.new("RGBA", image.size, (*background, 255))
    return Image.alpha_composite(base, image).convert("RGB")


def parse_colour(text: str) -> tuple[int, int, int]:
    """Raises ValueError, about the setting `background`."""
    try:
        red, green, blue = ImageColor.getrgb(text)[:3]
    except ValueError:
        raise ValueError(f'background must be a colour, such as "#ffffff" or "white", got "{text}"') from None
    return red, green, blue
