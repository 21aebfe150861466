"""Pixels from a file: every format, mode and orientation in, 8-bit sRGB out, and one error for all that can go wrong.

Nothing here changes a setting of the process: no warning filter, no switch of Pillow's, so any number of threads may decode.
"""

from __future__ import annotations

import functools
import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageCms, ImageColor, UnidentifiedImageError

# What is read. Not all that Pillow could: EPS would start Ghostscript, TGA and others take any bytes for an image.
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "TIFF", "GIF", "BMP", "JPEG2000", "PPM", "QOI")
HEIC_REMEDY = "HEIC is read only with pillow-heif: run `pip install pillow-heif`, or convert the file to JPEG or PNG"

MAX_PIXELS = 89_478_485  # Pillow's first limit, where it only warns: 0.25 GiB of RGB
CEILING = 2 * MAX_PIXELS  # its second one, where it refuses

ORIENTATION = 0x0112  # the EXIF tag: how to turn the stored pixels upright
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Values that count as white in a mode without a fixed range: the smallest that holds all pixels of the image.
WHITES = {"I": (65535.0, 2147483647.0), "F": (1.0, 255.0, 65535.0)}
HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1")
CUT_WORDS = (
    "truncat",
    "not enough",
    "unpack requires",
    "end of file",
    "end of data",
    "expected to read",
    "broken data stream",
    "premature",
)


class ImageError(ValueError):
    """A file that gives no image. `reason` is unreadable, truncated, bomb or unsupported; `detail` says it in words."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Probe:
    """What a file holds: Pillow's format and mode, pixels after orientation, number of frames."""

    format: str
    mode: str
    width: int
    height: int
    frames: int


def probe(file: Path | BinaryIO, max_pixels: int = MAX_PIXELS) -> Probe:
    """Decode the first frame in full, since damage shows only there, and say what it is. Raises `ImageError` alone."""
    with _decoded(file, max_pixels) as (image, mode, frames):
        turned = _orientation(image) >= 5
        width, height = image.size[::-1] if turned else image.size
        return Probe(image.format or "", mode, width, height, frames)


def open_image(file: Path | BinaryIO, background: str = "#ffffff", max_pixels: int = CEILING) -> Image.Image:
    """The first frame: upright, 8-bit sRGB, transparency composited over `background`. Raises `ImageError` for a bad file.

    The user's own limit of pixels is the images stage's to apply; here only Pillow's ceiling holds.
    """
    behind = _colour(background)
    with _decoded(file, max_pixels) as (image, _, _):
        flat = _over(_to_srgb(_eight_bit(image)), behind)
        turn = UPRIGHT.get(_orientation(image))
        return flat.transpose(turn) if turn is not None else flat


def open_alpha(file: Path | BinaryIO, max_pixels: int = CEILING) -> Image.Image | None:
    """The first frame's opacity: upright, 0 transparent to 255 opaque; None if the file knows none. Raises `ImageError` alone."""
    with _decoded(file, max_pixels) as (image, _, _):
        made = _eight_bit(image)
        if not made.has_transparency_data:
            return None
        alpha = made.convert("RGBA").getchannel("A")
        turn = UPRIGHT.get(_orientation(image))
        return alpha.transpose(turn) if turn is not None else alpha


# Opening: whatever a decoder raises for damaged bytes becomes an ImageError.


@contextmanager
def _decoded(file: Path | BinaryIO, max_pixels: int) -> Iterator[tuple[Image.Image, str, int]]:
    """The loaded first frame, with the mode the file says and the number of frames."""
    if isinstance(file, Path):
        try:
            opened = file.open("rb")
        except OSError as error:
            raise ImageError("unreadable", f"the file cannot be opened: {error.strerror or error}") from error
        with opened, _decoded(opened, max_pixels) as decoded:
            yield decoded
        return
    try:
        with Image.open(file, formats=_formats(file)) as image:
            pixels = image.width * image.height
            if pixels > max_pixels:  # between its two limits Pillow would only warn
                raise ImageError("bomb", f"{image.width} x {image.height} is {pixels} pixels, more than {max_pixels}")
            mode, frames = image.mode, int(getattr(image, "n_frames", 1))
            image.load()
            yield image, mode, frames
    except ImageError:
        raise
    except Exception as error:
        raise _named(error, file) from error


def _formats(file: BinaryIO) -> tuple[str, ...]:
    """The formats to try; an empty file and a HEIC file that nothing here can read are named at once."""
    head = _peek(file, 0, 64)
    if not head:
        raise ImageError("unreadable", "the file is empty")
    if head[4:8] != b"ftyp" or head[8:12] not in HEIC_BRANDS or b"avif" in head:
        return FORMATS
    if not _heif_plugin():
        raise ImageError("unsupported", HEIC_REMEDY)
    return ("HEIF",)


@functools.cache
def _heif_plugin() -> bool:
    try:
        import pillow_heif
    except ImportError:
        return False
    pillow_heif.register_heif_opener()
    return True


def _named(error: Exception, file: BinaryIO) -> ImageError:
    """The reason behind what a decoder raised; its words never hold a path or an address, so that equal files give equal rows."""
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return ImageError("bomb", str(error).replace(", could be decompression bomb DOS attack.", "").strip())
    if _cut_short(file):
        return ImageError("truncated", "the file ends before the image does")
    if isinstance(error, UnidentifiedImageError):
        return ImageError("unreadable", "no image in a format that is read: damaged, or something else under an image's name")
    words = str(error) or type(error).__name__
    if isinstance(error, EOFError) or any(hint in words.lower() for hint in CUT_WORDS):
        return ImageError("truncated", words)
    return ImageError("unreadable", f"it cannot be decoded: {words}")


def _peek(file: BinaryIO, offset: int, count: int, whence: int = io.SEEK_SET) -> bytes:
    """Some bytes of the file; it is left at its start. Nothing where they cannot be read."""
    try:
        file.seek(offset, whence)
        found = file.read(count)
        file.seek(0)
    except OSError:
        return b""
    return found


def _cut_short(file: BinaryIO) -> bool:
    """Whether the container itself says that bytes are missing at the end. Asked only of a file that failed to decode."""
    try:
        size = file.seek(0, io.SEEK_END)
    except OSError:
        return False
    head = _peek(file, 0, 16).ljust(16, b"\0")
    tail = _peek(file, max(0, size - 64), 64)
    if head[:4] == b"RIFF":
        return bool(size < 8 + struct.unpack("<I", head[4:8])[0])
    if head[:4] == b"\x89PNG":
        return b"IEND" not in tail
    if head[:3] == b"\xff\xd8\xff" or head[:4] == b"\xff\x4f\xff\x51":
        return b"\xff\xd9" not in tail
    if head[:4] == b"GIF8":
        return not tail.endswith(b";")
    if head[:2] == b"BM":
        return bool(size < struct.unpack("<I", head[2:6])[0])
    if head[:4] in (b"II*\0", b"MM\0*"):
        return _directory_passes_the_end(file, size, "<" if head[:1] == b"I" else ">")
    if head[4:8] in (b"ftyp", b"jP  "):
        return _boxes_pass_the_end(file, size)
    return False


def _boxes_pass_the_end(file: BinaryIO, size: int) -> bool:
    """AVIF, HEIC and JPEG 2000 are boxes, each with its length in front; a length of 0 means to the end."""
    at = 0
    while at < size:
        box = _peek(file, at, 16)
        if len(box) < 8:
            return True
        length = struct.unpack(">I", box[:4])[0]
        if length == 1 and len(box) == 16:
            length = struct.unpack(">Q", box[8:])[0]
        if length < 8:
            return False
        at += length
    return at > size


def _directory_passes_the_end(file: BinaryIO, size: int, order: str) -> bool:
    """TIFF: whether the first directory, or a value that it keeps elsewhere, lies beyond the end."""
    at = struct.unpack(order + "I", _peek(file, 4, 4))[0]
    count = _peek(file, at, 2)
    if len(count) < 2:
        return True
    entries = _peek(file, at + 2, 12 * struct.unpack(order + "H", count)[0])
    if len(entries) < 12 * struct.unpack(order + "H", count)[0]:
        return True
    for _, kind, number, value in struct.iter_unpack(order + "HHII", entries):
        nbytes = number * {3: 2, 4: 4, 5: 8, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}.get(kind, 1)
        if nbytes > 4 and value + nbytes > size:
            return True
    return False


# Pixels: the range, then the colour, then what shows through.


def _orientation(image: Image.Image) -> int:
    """1 to 8, after load(): formats that Pillow turns by itself say 1 by then. A broken EXIF block turns nothing."""
    try:
        value = image.getexif().get(ORIENTATION, 1)
    except (OSError, ValueError, SyntaxError, TypeError, KeyError, AttributeError, EOFError, struct.error):
        return 1
    return value if isinstance(value, int) and value in UPRIGHT else 1


def _eight_bit(image: Image.Image) -> Image.Image:
    """Modes of more than 8 bits scaled, where Pillow's convert() would clip; other modes as they are."""
    if not image.mode.startswith(("I", "F")):
        return image
    values = np.nan_to_num(np.asarray(image).astype(np.float64), nan=0.0, posinf=np.finfo(np.float64).max, neginf=0.0)
    whites = WHITES.get(image.mode, (65535.0,))
    top = float(values.max(initial=0.0))
    white = next((w for w in whites if top <= w), top)
    grey = Image.fromarray(np.rint(np.clip(values / white, 0.0, 1.0) * 255.0).astype(np.uint8))
    hidden = image.info.get("transparency")
    if isinstance(hidden, int):  # a PNG may declare one grey as transparent
        grey.putalpha(Image.fromarray(np.where(values == hidden, 0, 255).astype(np.uint8)))
    if "icc_profile" in image.info:
        grey.info["icc_profile"] = image.info["icc_profile"]
    return grey


def _to_srgb(image: Image.Image) -> Image.Image:
    """RGB, or RGBA where anything is transparent, in sRGB. A profile that is broken or does not fit the mode is ignored."""
    profile = image.info.get("icc_profile")
    if image.mode == "LAB":
        return _through(image, ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        alpha = image.getchannel("A")
        colour = _with_profile(image.convert("RGB"), profile)
        colour.putalpha(alpha)
        return colour
    if image.mode not in ("RGB", "L", "CMYK"):
        image = image.convert("L" if image.mode == "1" else "RGB")
    return _with_profile(image, profile)


def _with_profile(image: Image.Image, profile: bytes | None) -> Image.Image:
    if not profile:
        return image.convert("RGB")
    try:
        return _through(image, ImageCms.ImageCmsProfile(io.BytesIO(profile)))
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return image.convert("RGB")


def _through(image: Image.Image, profile: ImageCms.ImageCmsProfile) -> Image.Image:
    """From the profile's colours to sRGB, as image editors do it: relative colorimetric, black to black."""
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


def _over(image: Image.Image, behind: tuple[int, int, int]) -> Image.Image:
    if image.mode != "RGBA":
        return image if image.mode == "RGB" else image.convert("RGB")
    base = Image.new("RGBA", image.size, (*behind, 255))
    return Image.alpha_composite(base, image).convert("RGB")


def _colour(background: str) -> tuple[int, int, int]:
    try:
        red, green, blue = ImageColor.getrgb(background)[:3]
    except ValueError:
        raise ValueError(f'"{background}" is no background colour: write it as "#ffffff" or by name, as "white"') from None
    return red, green, blue
