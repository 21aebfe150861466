"""Open an image file of any supported format: its facts (`probe`), its pixels (`open_image`), its opacity (`open_alpha`).

Every failure is an ImageError. No setting of the process is changed (no warning filter, no switch of Pillow's), so any
number of threads may decode.
"""

from __future__ import annotations

import functools
import io
import math
import re
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageCms, ImageColor, UnidentifiedImageError

from stages.text_to_image.imaging import packed
from stages.untrusted import open_regular

# Pillow reads more formats, but EPS would start Ghostscript, and TGA and others accept any bytes as an image.
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "TIFF", "GIF", "BMP", "JPEG2000", "PPM", "QOI")
HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1")

BACKGROUND = "#ffffff"  # behind transparent pixels
MAX_PIXELS = 89_478_485  # Pillow warns above this limit: 0.25 GiB of RGB
CEILING = 2 * MAX_PIXELS  # Pillow refuses above this limit
MAX_BYTES = 1_000_000_000  # 89 million pixels of four 16-bit channels have 0.72 GB
CEILING_BYTES = packed.CEILING_BYTES

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
TRUNCATED = "truncat|not enough|unpack requires|end of file|end of data|expected to read|broken data stream|premature"


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
    format: str  # Pillow's name
    mode: str  # Pillow's name, of the pixels in the file
    width: int  # upright, pixels
    height: int  # upright, pixels
    frames: int


def probe(file: Path | BinaryIO, max_pixels: int = MAX_PIXELS) -> Probe:
    """Decode the first frame, since damage shows only then. Raises ImageError, also if the white of a grey image is unclear."""
    with _decoded(file, max_pixels) as (image, mode, frames):
        if image.mode.startswith(("I", "F")):
            _white(image)  # raises if it is unclear
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
    file: Path | BinaryIO, background: str = BACKGROUND, max_pixels: int = CEILING, at_least: int | None = None
) -> Image.Image:
    """The first frame, upright, as 8-bit sRGB, over `background`. `at_least`: a JPEG may be decoded smaller, no side below it."""
    colour = parse_colour(background)
    with _decoded(file, max_pixels, at_least) as (image, _, _):
        pixels = to_srgb(eight_bit(image))
        if pixels.mode == "RGBA":
            pixels = Image.alpha_composite(Image.new("RGBA", pixels.size, (*colour, 255)), pixels).convert("RGB")
        return _upright(pixels, _orientation(image))


def open_alpha(file: Path | BinaryIO, max_pixels: int = CEILING) -> Image.Image | None:
    """The opacity of the first frame, upright, in mode "L" (255 is opaque); None without transparency."""
    with _decoded(file, max_pixels) as (image, _, _):
        pixels = eight_bit(image)
        if not pixels.has_transparency_data:
            return None
        return _upright(pixels.convert("RGBA").getchannel("A"), _orientation(image))


class Room:
    """At most `pixels` are taken at once; a larger image waits until it is alone."""

    def __init__(self, pixels: int) -> None:
        self.pixels = pixels
        self._used = 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, pixels: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + pixels <= self.pixels)
            self._used += pixels
        try:
            yield
        finally:
            with self._changed:
                self._used -= pixels
                self._changed.notify_all()


ROOM = Room(100_000_000)  # in a decoded image a pixel takes 4 to 12 bytes: about 1 GB in all


@contextmanager
def _decoded(file: Path | BinaryIO, max_pixels: int, at_least: int | None = None) -> Iterator[tuple[Image.Image, str, int]]:
    """(image, mode in the file, frames). An exception in the body of the `with` becomes an ImageError too."""
    with open_file(file) as opened:
        try:
            with Image.open(opened, formats=_formats(opened)) as image:
                pixels = image.width * image.height
                if pixels > max_pixels:  # between its two limits, Pillow would only warn
                    raise ImageError("bomb", f"{image.width} x {image.height} is {pixels} pixels, more than {max_pixels}")
                if (work := _scans(image, opened) * pixels) > MAX_WORK:
                    raise ImageError("bomb", f"{work // pixels} scans of {pixels} pixels: save it again as a JPEG")
                mode, frames = image.mode, min(int(getattr(image, "n_frames", 1)), 2**31 - 1)  # a header may say more
                if at_least:
                    image.draft(image.mode, (at_least, at_least))
                image.load()
                yield image, mode, frames
        except ImageError:
            raise
        except Exception as error:
            raise _image_error(error, opened) from error


@contextmanager
def open_file(file: Path | BinaryIO) -> Iterator[BinaryIO]:
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
    """The formats that Pillow may try. Raises ImageError for an empty file or an endless header."""
    head = peek(file, 0, 64)
    if not head:
        raise ImageError("unreadable", "the file is empty")
    _check_header(file)
    # The brand mif1 may be HEIC or AVIF.
    if head[4:8] != b"ftyp" or head[8:12] not in HEIC_BRANDS or b"avif" in head:
        return FORMATS
    _register_heif()
    return ("HEIF",)


@functools.cache
def _register_heif() -> None:
    import pillow_heif

    pillow_heif.register_heif_opener()


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
    if isinstance(error, EOFError) or re.search(TRUNCATED, words, re.IGNORECASE):
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


# Colours: the value range is scaled to 8 bits, then the profile is applied

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


def parse_colour(text: str) -> tuple[int, int, int]:
    """Raises ValueError, about the setting `background`."""
    try:
        red, green, blue = ImageColor.getrgb(text)[:3]
    except ValueError:
        raise ValueError(f'background must be a colour, such as "#ffffff" or "white", got "{text}"') from None
    return red, green, blue


# What takes a decoder long: a progressive JPEG of 0.42 MB with 500 scans 300 s, a PPM with a comment of 50 MB 90 s

MAX_WORK = 2_000_000_000  # scans x pixels: about 10 s
LONGEST_HEADER = 65_536  # bytes of a PPM's header


def _scans(image: Image.Image, file: BinaryIO) -> int:
    if image.format not in ("JPEG", "MPO") or not image.info.get("progressive"):
        return 1
    place, count, last = file.tell(), 0, b""
    file.seek(0)
    while part := file.read(1 << 20):
        count += (last + part).count(b"\xff\xda")  # in the data of a scan, a zero follows each 0xff
        last = part[-1:]
    file.seek(place)
    return count


def _check_header(file: BinaryIO) -> None:
    head = peek(file, 0, LONGEST_HEADER)
    if re.match(rb"P[1-6fF]\s", head) and len(head) == LONGEST_HEADER:
        words = re.sub(rb"#[^\r\n]*(?:[\r\n]|$)", b" ", head).split(maxsplit=4)
        if len(words) < 4:
            raise ImageError("unreadable", f"its header is longer than {LONGEST_HEADER} bytes")


# Headers: whether a file is cut short, and how many pixels an AVIF has

TIFF_BYTES = {3: 2, 4: 4, 5: 8, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}  # bytes per value of a TIFF field type; 1 for all others
HEADER = 4096  # bytes at the start of an AVIF file in which its sizes are looked for
TAIL = 64  # bytes at the end of a file in which its end marker must lie


def is_truncated(file: BinaryIO) -> bool:
    """Bytes or the end marker are missing. Only for a file that failed to decode: a good one may lack it. Moves the position."""
    try:
        size = file.seek(0, io.SEEK_END)
    except OSError:
        return False
    head = peek(file, 0, 16).ljust(16, b"\0")
    for offset, signature, check in CONTAINERS:
        if head[offset:].startswith(signature):
            return check(file, size)
    return False


def peek(file: BinaryIO, offset: int, count: int) -> bytes:
    """Bytes at `offset`, and back to the start; b"" if the file cannot be read."""
    try:
        file.seek(offset)
        data = file.read(count)
        file.seek(0)
    except OSError:
        return b""
    return data


def avif_size(file: BinaryIO) -> tuple[int, int] | None:
    """(width, height) of the largest image in an AVIF header, before rotation; None for other files. Seeks to the start."""
    head = peek(file, 0, HEADER)
    if head[4:8] != b"ftyp" or b"avif" not in head[8:64]:
        return None
    boxes = (part[4:12] for part in head.split(b"ispe")[1:])  # after the box's name: version and flags, width, height
    sizes = [struct.unpack(">II", part) for part in boxes if len(part) == 8]
    return max(sizes, key=lambda size: size[0] * size[1], default=None)


def _lacks(marker: bytes) -> Callable[[BinaryIO, int], bool]:
    return lambda file, size: marker not in peek(file, max(0, size - TAIL), TAIL)


def _boxes(file: BinaryIO, size: int) -> bool:
    """AVIF, HEIC and JPEG 2000 are boxes that begin with their length."""
    at = 0
    while at < size:
        box = peek(file, at, 16)
        if len(box) < 8:
            return True
        length = _number(">I", box[:4])
        # 1: the length follows as 64 bits. 0: the box reaches to the end of the file.
        if length == 1 and len(box) == 16:
            length = _number(">Q", box[8:])
        if length < 8:
            return False
        at += length
    return at > size


def _tiff(file: BinaryIO, size: int) -> bool:
    """Whether the first directory, or a value of one of its fields, lies beyond the end."""
    order = "<" if peek(file, 0, 1) == b"I" else ">"
    at = _number(order + "I", peek(file, 4, 4))
    count = peek(file, at, 2)
    if len(count) < 2:
        return True
    nbytes = 12 * _number(order + "H", count)
    entries = peek(file, at + 2, nbytes)
    if len(entries) < nbytes:
        return True
    fields = struct.iter_unpack(order + "HHII", entries)
    spans = ((number * TIFF_BYTES.get(kind, 1), value) for _, kind, number, value in fields)
    return any(length > 4 and value + length > size for length, value in spans)  # up to 4 bytes lie in the field itself


def _number(form: str, data: bytes) -> int:
    return int(struct.unpack(form, data.ljust(struct.calcsize(form), b"\0"))[0])


CONTAINERS: tuple[tuple[int, bytes, Callable[[BinaryIO, int], bool]], ...] = (
    (0, b"RIFF", lambda file, size: size < 8 + _number("<I", peek(file, 4, 4))),  # WebP
    (0, b"\x89PNG", _lacks(b"IEND")),
    (0, b"\xff\xd8\xff", _lacks(b"\xff\xd9")),  # JPEG
    (0, b"\xff\x4f\xff\x51", _lacks(b"\xff\xd9")),  # a bare JPEG 2000 stream
    (0, b"GIF8", lambda file, size: peek(file, max(0, size - 1), 1) != b";"),
    (0, b"BM", lambda file, size: size < _number("<I", peek(file, 2, 4))),
    (0, b"II*\0", _tiff),
    (0, b"MM\0*", _tiff),
    (4, b"ftyp", _boxes),  # AVIF, HEIC
    (4, b"jP  ", _boxes),  # JPEG 2000
)
