"""Our decoding of image files beside other programs', which test_decoding.py asks of a folder, with pyvips installed.

Every file below it is decoded by us and by libvips, turned upright, and laid on white. Pixels within 2 levels of 255 count
as equal. Three kinds are counted apart, because programs convert them by rules of their own: files with an ICC profile, CMYK,
and files of more than 8 bits or with signed numbers.

A file that differs from libvips' pixels, or that libvips cannot decode, is compared with two more references:
- ImageMagick, if a program `magick` or `convert` is found.
- AVIF with chroma at half the resolution (4:2:0): the planes that FFmpeg decodes, if the package av is installed. Chroma is
  interpolated bilinearly in float64, as libavif and browsers do; libvips repeats each chroma sample four times.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from stages.text_to_image.imaging.decode import ORIENTATION, UPRIGHT, ImageError, open_image

LEVELS = 2
RED, BLUE = 0.299, 0.114  # weights of red and blue in luma, BT.601
# Files of the test images of Pillow, libheif and libvips that differ from every reference, and why.
EDGE = (
    "AVIF, turned by a quarter: 33 and 13 of 273,280 pixels by up to 6 levels, all at the edge where the stored side is odd; the "
    "library libyuv, which libavif uses, takes the last chroma sample there alone"
)
REASONS = {
    "rot1mir0.avif": EDGE,
    "rot3mir1.avif": EDGE,
    "xmp_tags_orientation_exiftool.png": "its XMP metadata say upside down: we turn it, as Pillow's exif_transpose does; "
    "libvips and ImageMagick read orientation from EXIF alone",
    "ojpeg-tile.tif": "JPEG in TIFF of the old style: the libtiff in libvips' wheel is built without it and gives a transparent "
    "picture, ImageMagick takes YCbCr for RGB; libvips' own test expects (135, 156, 177) at column 10, row 10, which we give",
}


def ours(path: Path) -> np.ndarray | None:
    """(height, width, 3); None if it is refused, as below."""
    try:
        return np.asarray(open_image(path, "#ffffff"))
    except ImageError:
        return None


def theirs(path: Path) -> tuple[np.ndarray | None, str]:
    """(pixels, conversion): "ICC", "CMYK" or "range" if libvips would have to convert colours, else ""."""
    pyvips = importlib.import_module("pyvips")
    conversion = ""
    try:
        image = pyvips.Image.new_from_file(str(path), fail_on="error")
        conversion = "ICC" if image.get_typeof("icc-profile-data") else "CMYK" if image.interpretation == "cmyk" else ""
        conversion = conversion or ("range" if image.format != "uchar" else "")
        image = image.autorot()
        if image.hasalpha():
            image = image.flatten(background=[65535 if image.format == "ushort" else 255] * (image.bands - 1))
        pixels = image.colourspace("srgb").cast("uchar").numpy()
    except pyvips.Error:
        return None, conversion
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    return (pixels.repeat(3, 2) if pixels.shape[2] == 1 else pixels[..., :3]), conversion


def from_imagemagick(path: Path) -> np.ndarray | None:
    """Of the first frame; None if it cannot, or is not installed."""
    program = shutil.which("magick") or shutil.which("convert")
    if program is None:
        return None
    words = ["-auto-orient", "-background", "white", "-alpha", "remove", "-alpha", "off", "-colorspace", "sRGB", "-depth", "8"]
    done = subprocess.run([program, f"{path}[0]", *words, "PPM:-"], capture_output=True, check=False)
    return np.asarray(Image.open(io.BytesIO(done.stdout)).convert("RGB")) if done.stdout.startswith(b"P") else None


def bilinear(plane: np.ndarray, size: int, axis: int) -> np.ndarray:
    """Interpolate a chroma plane from half the resolution to `size` samples along an axis. Each output sample lies a quarter
    of a chroma sample from its nearest neighbour, which has the weight 3/4. At the border the outermost sample continues.
    """
    at = np.arange(size)
    last = plane.shape[axis] - 1
    near, far = np.minimum(at // 2, last), np.clip(at // 2 + np.where(at % 2, 1, -1), 0, last)
    between: np.ndarray = 0.75 * plane.take(near, axis) + 0.25 * plane.take(far, axis)
    return between


def with_bilinear_chroma(path: Path) -> np.ndarray | None:
    """An 8-bit AVIF file with 4:2:0 chroma, full range, BT.601: FFmpeg's planes, chroma bilinear in float64. None: others."""
    head = path.read_bytes()[:64]
    if importlib.util.find_spec("av") is None or head[4:8] != b"ftyp" or b"avif" not in head:
        return None
    av = importlib.import_module("av")
    try:
        with av.open(str(path)) as container:
            frame = next(container.decode(video=0))
    except (av.FFmpegError, StopIteration):
        return None
    if frame.format.name not in ("yuv420p", "yuvj420p") or (frame.color_range, frame.colorspace) != (2, 6):
        return None
    rows = [np.frombuffer(plane, np.uint8).reshape(plane.height, plane.line_size)[:, : plane.width] for plane in frame.planes]
    luma, *chroma = (plane.astype(float) for plane in rows)
    height, width = luma.shape
    blue, red = (bilinear(bilinear(plane - 128, height, 0), width, 1) for plane in chroma)
    r, b = luma + 2 * (1 - RED) * red, luma + 2 * (1 - BLUE) * blue
    g = (luma - RED * r - BLUE * b) / (1 - RED - BLUE)
    pixels = Image.fromarray(np.stack([r, g, b], -1).round().clip(0, 255).astype(np.uint8))
    with Image.open(path) as image:
        turn = UPRIGHT.get(image.getexif().get(ORIENTATION, 1))
    return np.asarray(pixels if turn is None else pixels.transpose(turn))


OTHERS: dict[str, Callable[[Path], np.ndarray | None]] = {
    "bilinear chroma": with_bilinear_chroma,
    "ImageMagick": from_imagemagick,
}


def equal(mine: np.ndarray, other: np.ndarray) -> bool:
    """Within LEVELS."""
    return mine.shape == other.shape and int(np.abs(mine.astype(int) - other).max()) <= LEVELS


def compare(path: Path) -> str:
    """ "equal", "equal to" another reference than libvips, "differs", "only ours", "only ours, equal to" another reference, "only
    theirs" or "both refuse". If its colours are converted, the conversion follows, as in "differs, ICC".
    """
    mine, (other, conversion) = ours(path), theirs(path)
    kind = f", {conversion}" if conversion else ""
    if mine is None:
        return "both refuse" if other is None else "only theirs"
    if other is not None and equal(mine, other):
        return f"equal{kind}"
    begin = "only ours" if other is None else ""
    for name, decode in OTHERS.items():
        pixels = decode(path)
        if pixels is not None and equal(mine, pixels):
            return f"{begin}, equal to {name}" if begin else f"equal to {name}{kind}"
    return begin or f"differs{kind}"


def shares(counts: Counter[str]) -> tuple[int, int, int]:
    """Of files decoded without conversion: those equal to libvips' pixels, those equal to those of any reference, and all."""
    any_reference = counts["equal"] + sum(counts[f"equal to {name}"] for name in OTHERS)
    return counts["equal"], any_reference, any_reference + counts["differs"]
