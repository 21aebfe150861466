"""Open an image file of any supported format: its facts (`probe`), its pixels (`open_image`), its opacity (`open_alpha`).

Every failure is an ImageError. No setting of the process is changed (no warning filter, no switch of Pillow's), so any
number of threads may decode.
"""

from __future__ import annotations

import functools
import io
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError

from stages.text_to_image.imaging import packed
from stages.text_to_image.imaging.colour import RangeError, check_range, composite, eight_bit, parse_colour, to_srgb
from stages.text_to_image.imaging.truncation import avif_size, is_truncated, peek
from stages.untrusted import open_regular

# Pillow reads more formats, but EPS would start Ghostscript, and TGA and others accept any bytes as an image.
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "TIFF", "GIF", "BMP", "JPEG2000", "PPM", "QOI")
HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1")
HEIC_REMEDY = f"HEIC needs pillow-heif: run `{sys.executable} -m pip install pillow-heif`, or convert the file to JPEG or PNG"

MAX_PIXELS = 89_478_485  # Pillow warns above this limit: 0.25 GiB of RGB
CEILING = 2 * MAX_PIXELS  # Pillow refuses above this limit
MAX_BYTES = 1_000_000_000  # 89 million pixels of four 16-bit channels have 0.72 GB
CEILING_BYTES = 4_000_000_000  # a whole file is in memory while its crops are cut

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
# Words in a decoder's error message that mean that the file ended too early.
TRUNCATION_WORDS = (
    "truncat",
    "not enough",
    "unpack requires",
    "end of file",
    "end of data",
    "expected to read",
    "broken data stream",
    "premature",
)


# Files with these suffixes, or without any suffix, are opened whatever they hold. Other suffixes are rejected unopened:
# a camera's raw file would be taken for a TIFF file and give only its thumbnail.
# fmt: off
IMAGE_SUFFIXES = frozenset({
    ".apng", ".avif", ".avifs", ".bmp", ".dib", ".gif", ".heic", ".heif", ".hif", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg",
    ".jpg", ".jpx", ".mpo", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".qoi", ".tif", ".tiff", ".webp",
})
# fmt: on


class ImageError(ValueError):
    """Why an image file cannot be used. `reason` is unreadable, truncated, bomb (too many pixels), too_large (too many bytes),
    range (white is unknown), unsupported, too_small or mask; `detail` is a sentence.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Probe:
    """Facts about an image file."""

    format: str  # Pillow's name
    mode: str  # Pillow's name, of the pixels in the file
    width: int  # upright, pixels
    height: int  # upright, pixels
    frames: int


def probe(file: Path | BinaryIO, max_pixels: int = MAX_PIXELS) -> Probe:
    """Decode the first frame, since damage shows only then. Raises ImageError, also if the white of a grey image is unclear."""
    with _decoded(file, max_pixels) as (image, mode, frames):
        check_range(image)
        sideways = _orientation(image) >= 5
        width, height = image.size[::-1] if sideways else image.size
        return Probe(image.format or "", mode, width, height, frames)


def pixel_count(file: BinaryIO) -> int:
    """Width x height from the header; 0 if it cannot be read, and decoding says why. Seeks to the start."""
    try:
        with Image.open(file, formats=_formats(file)) as image:
            return image.width * image.height
    except Exception:  # noqa: BLE001  (any decoder's error; `probe` and `open_image` report it)
        return 0
    finally:
        file.seek(0)


def open_image(
    file: Path | BinaryIO, background: str = "#ffffff", max_pixels: int = CEILING, at_least: int | None = None
) -> Image.Image:
    """The first frame, upright, as 8-bit sRGB, with `background` behind transparent pixels.

    `at_least` lets a JPEG be decoded at a reduced size, which is faster: no side falls below that many pixels.
    """
    colour = parse_colour(background)
    with _decoded(file, max_pixels, at_least) as (image, _, _):
        return _upright(composite(to_srgb(eight_bit(image)), colour), _orientation(image))


def open_alpha(file: Path | BinaryIO, max_pixels: int = CEILING) -> Image.Image | None:
    """The opacity of the first frame, upright, in mode "L" (255 is opaque); None without transparency."""
    with _decoded(file, max_pixels) as (image, _, _):
        pixels = eight_bit(image)
        if not pixels.has_transparency_data:
            return None
        return _upright(pixels.convert("RGBA").getchannel("A"), _orientation(image))


@contextmanager
def _decoded(file: Path | BinaryIO, max_pixels: int, at_least: int | None = None) -> Iterator[tuple[Image.Image, str, int]]:
    """(image, mode in the file, frames). An exception in the body of the `with` becomes an ImageError too."""
    with _opened(file) as opened:
        try:
            with Image.open(opened, formats=_formats(opened)) as image:
                pixels = image.width * image.height
                if pixels > max_pixels:  # between its two limits, Pillow would only warn
                    raise ImageError("bomb", f"{image.width} x {image.height} is {pixels} pixels, more than {max_pixels}")
                mode, frames = image.mode, int(getattr(image, "n_frames", 1))
                if at_least:
                    image.draft(image.mode, (at_least, at_least))
                image.load()
                yield image, mode, frames
        except ImageError:
            raise
        except Exception as error:
            raise _image_error(error, opened) from error


@contextmanager
def _opened(file: Path | BinaryIO) -> Iterator[BinaryIO]:
    if isinstance(file, Path) and packed.split(file):
        try:
            file = io.BytesIO(packed.read_member(file))
        except ValueError as error:
            raise ImageError("unreadable", str(error)) from None
    if not isinstance(file, Path):
        yield file
        return
    try:
        opened = open_regular(file)
    except OSError as error:
        raise ImageError("unreadable", f"the file cannot be opened: {error.strerror or error}") from error
    except ValueError:
        raise ImageError("unreadable", "not a regular file") from None
    with opened:
        yield opened


def _formats(file: BinaryIO) -> tuple[str, ...]:
    """The formats that Pillow may try. Raises ImageError for an empty file, and for HEIC without pillow-heif."""
    head = peek(file, 0, 64)
    if not head:
        raise ImageError("unreadable", "the file is empty")
    # The brand mif1 may be HEIC or AVIF.
    if head[4:8] != b"ftyp" or head[8:12] not in HEIC_BRANDS or b"avif" in head:
        return FORMATS
    if not _register_heif():
        raise ImageError("unsupported", HEIC_REMEDY)
    return ("HEIF",)


@functools.cache
def _register_heif() -> bool:
    try:
        import pillow_heif
    except ImportError:
        return False
    pillow_heif.register_heif_opener()
    return True


def _image_error(error: Exception, file: BinaryIO) -> ImageError:
    """Texts have no path and no memory address: they are stored in tables."""
    if isinstance(error, RangeError):
        return ImageError("range", str(error))
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return ImageError("bomb", str(error).replace(", could be decompression bomb DOS attack.", "").strip())
    if is_truncated(file):
        return ImageError("truncated", "the file ends before the image does")
    if isinstance(error, UnidentifiedImageError) and (size := avif_size(file)) and size[0] * size[1] > CEILING:
        width, height = size  # libavif refuses such files with the error that it gives for damage
        return ImageError("bomb", f"{width} x {height} is {width * height} pixels, more than {CEILING}")
    if isinstance(error, UnidentifiedImageError):
        return ImageError("unreadable", "no image in a known format: the file is damaged, or is not an image")
    words = str(error) or type(error).__name__
    if isinstance(error, EOFError) or any(hint in words.lower() for hint in TRUNCATION_WORDS):
        return ImageError("truncated", words)
    return ImageError("unreadable", f"the file cannot be decoded: {words}")


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 (upright) to 8. After `image.load()`: Pillow turns some formats upright while it loads them."""
    try:
        value = image.getexif().get(ORIENTATION, 1)
    except (OSError, ValueError, SyntaxError, TypeError, KeyError, AttributeError, EOFError, struct.error):
        return 1
    return value if isinstance(value, int) and value in UPRIGHT else 1


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    turn = UPRIGHT.get(orientation)
    return image if turn is None else image.transpose(turn)
