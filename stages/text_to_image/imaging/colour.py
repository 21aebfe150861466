"""Convert decoded pixels to 8-bit sRGB: scale the value range, apply the colour profile, composite over a background."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageCms, ImageColor

# White in a mode without a fixed range: the smallest of these values that no pixel exceeds.
WHITES = {"I": (65535.0, 2147483647.0), "F": (1.0, 255.0, 65535.0)}


def eight_bit(image: Image.Image) -> Image.Image:
    """Scale a grey image of 16 bits, 32 bits or floats to 8 bits. Return it in mode "L". If one grey value is
    transparent, return it in mode "LA". An image in another mode is returned unchanged. Pillow's convert() would clip the
    values instead of scaling them.

    White is 65535 for 16 bits. For other modes, it is the smallest usual white (see WHITES) that is not below the largest
    value.
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
