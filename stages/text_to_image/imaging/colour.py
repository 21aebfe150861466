"""Convert decoded pixels to 8-bit sRGB: scale the value range, apply the colour profile, composite over a background."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageCms, ImageColor

# White in a mode without a fixed range: the smallest of these values that no pixel exceeds.
WHITES = {"I": (65535.0, 2147483647.0), "F": (1.0, 255.0, 65535.0)}


def eight_bit(image: Image.Image) -> Image.Image:
    """Scale a grey image of 16 or 32 bits, or of floats, to 8 bits: mode "L", or "LA" with transparency. Other modes are
    returned unchanged. Pillow's convert() would clip the values instead.

    White is 65535 for 16 bits; for other modes, the smallest usual range (see WHITES) that holds the largest value.
    """
    if not image.mode.startswith(("I", "F")):
        return image
    values = np.nan_to_num(np.asarray(image).astype(np.float64), nan=0.0, posinf=np.finfo(np.float64).max, neginf=0.0)
    largest = float(values.max(initial=0.0))
    white = next((white for white in WHITES.get(image.mode, (65535.0,)) if largest <= white), largest)
    grey = Image.fromarray(np.rint(np.clip(values / white, 0.0, 1.0) * 255.0).astype(np.uint8))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):  # a PNG may declare one grey value as transparent
        grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    if "icc_profile" in image.info:
        grey.info["icc_profile"] = image.info["icc_profile"]
    return grey


def to_srgb(image: Image.Image) -> Image.Image:
    """Convert an 8-bit image of any mode to sRGB: mode "RGBA" if the image has transparency, else "RGB". The image's colour
    profile is applied, but ignored if it is broken or does not fit the mode.
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
    """Convert an image from the colours of a profile to sRGB as image editors do: relative colorimetric, black to black."""
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
    """Return an RGB or RGBA image in mode "RGB", with transparent pixels over the background (red, green, blue, 0 to 255)."""
    if image.mode != "RGBA":
        return image if image.mode == "RGB" else image.convert("RGB")
    base = Image.new("RGBA", image.size, (*background, 255))
    return Image.alpha_composite(base, image).convert("RGB")


def parse_colour(text: str) -> tuple[int, int, int]:
    """Parse a background colour such as "#ffffff" or "white" to (red, green, blue), 0 to 255. ValueError for another text."""
    try:
        red, green, blue = ImageColor.getrgb(text)[:3]
    except ValueError:
        raise ValueError(f'background must be a colour, such as "#ffffff" or "white", got "{text}"') from None
    return red, green, blue
