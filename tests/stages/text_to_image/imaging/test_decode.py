"""Decoding of real files of every format, written by Pillow or byte by byte, intact and damaged."""

import io
import struct
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pillow_heif
import pytest
from PIL import Image, ImageFile, ImageOps

from stages.text_to_image.imaging import decode
from stages.text_to_image.imaging.decode import ImageError, Room, open_image, probe
from tests.stages.text_to_image.imaging.pictures import opened, picture, png, refused, saved

pillow_heif.register_heif_opener()
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")
FORMATS = {
    "JPEG": {"quality": 95},
    "JPEG progressive": {"quality": 95, "progressive": True},
    "PNG": {},
    "WEBP": {"quality": 95},
    "WEBP lossless": {"lossless": True},
    "AVIF": {"quality": 95},
    "TIFF": {},
    "TIFF lzw": {"compression": "tiff_lzw"},
    "GIF": {},
    "BMP": {},
    "JPEG2000": {},
    "PPM": {},
    "QOI": {},
    "HEIF": {"quality": 95},
}
ANIMATED = {"GIF": {}, "PNG": {}, "WEBP": {"lossless": True}, "AVIF": {"quality": 95}}


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_decoded_to_the_picture_that_was_saved(kind):
    data = saved(picture(), kind, **FORMATS[kind])
    found = probe(io.BytesIO(data))
    assert (found.format, found.width, found.height, found.frames) == (kind.split()[0], 48, 32, 1)
    error = np.abs(np.asarray(opened(data), float) - np.asarray(picture(), float)).mean()
    assert error < (12 if kind == "GIF" else 3)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_cut_short_anywhere_is_refused_as_truncated_unless_it_has_all_pixels(kind):
    data = saved(picture(), kind, **FORMATS[kind])
    for size in np.linspace(16, len(data) - 1, 25).astype(int):
        try:
            image = opened(data[:size])
        except ImageError as error:
            assert error.reason == "truncated", f"{size} of {len(data)} bytes: {error}"
        else:  # only an end mark is missing
            assert size > len(data) * 0.9 and image.tobytes() == opened(data).tobytes()
    assert (refused(b"").reason, refused(b"").detail) == ("unreadable", "the file is empty")


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_bytes_give_an_image_or_an_image_error_and_nothing_else(kind):
    data = saved(picture(16, 12), kind, **FORMATS[kind])
    rng = np.random.default_rng(0)
    for _ in range(60):
        broken = bytearray(data)
        for at in rng.integers(0, len(data), rng.integers(1, 6)):
            broken[at] = rng.integers(256)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                opened(bytes(broken))
        except ImageError as error:
            assert error.reason in ("unreadable", "truncated", "bomb", "unsupported")
            assert error.detail and "0x7" not in error.detail and "\n" not in error.detail


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP lossless", "JPEG", "AVIF", "HEIF"])
def test_every_orientation_is_turned_upright_and_the_probe_has_the_upright_size(kind):
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[decode.ORIENTATION] = orientation
        data = saved(picture(), kind, **(FORMATS[kind] | {"exif": exif.tobytes()}))
        upright = picture()
        upright.getexif()[decode.ORIENTATION] = orientation
        upright = ImageOps.exif_transpose(upright)
        found, image = probe(io.BytesIO(data)), opened(data)
        assert image.size == upright.size == (found.width, found.height), orientation
        assert np.abs(np.asarray(image, float) - np.asarray(upright, float)).mean() < 3, orientation
    broken = saved(picture(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert opened(broken).size == (48, 32), "no orientation can be read"


def test_threads_decode_no_more_pixels_at_once_than_there_is_room_for():
    room, together, most = Room(100), 0, []

    def decode(pixels):
        nonlocal together
        with room.taken(pixels):
            together += pixels
            most.append(together)
            together -= pixels

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(decode, [60, 50, 200, 30, 1] * 40))
    assert len(most) == 200 and max(most) == 200  # the one that has no room waits until it is alone


@pytest.mark.parametrize("kind", ANIMATED)
def test_the_first_frame_of_an_animation_is_used_and_all_frames_are_counted(kind):
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "lime", "blue")]
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=100, **ANIMATED[kind])
    assert probe(io.BytesIO(data)).frames == 3
    assert np.allclose(opened(data).getpixel((16, 16)), (255, 0, 0), atol=4)


def test_a_decompression_bomb_is_refused_before_it_is_decoded_even_where_pillow_would_only_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for side in (10_000, 30_000):  # between the decoder's two limits, and above both
            found = refused(png(side, side, 8, 0, [b"\0"]))
            assert found.reason == "bomb" and str(side * side) in found.detail
    with pytest.raises(ImageError, match="bomb: 48 x 32 is 1536 pixels, more than 1535"):
        probe(io.BytesIO(saved(picture())), max_pixels=1535)
    assert probe(io.BytesIO(saved(picture())), max_pixels=1536).width == 48


def test_an_avif_file_with_more_pixels_than_its_decoder_takes_is_refused_as_too_many_pixels_not_as_damaged():
    data, size = saved(picture(), "AVIF"), struct.pack(">II", 48, 32)
    assert data.count(b"ispe" + bytes(4) + size) == 1
    huge = data.replace(b"ispe" + bytes(4) + size, b"ispe" + bytes(4) + struct.pack(">II", 17_000, 17_000))
    assert refused(huge).reason == "bomb" and "17000 x 17000 is 289000000 pixels" in refused(huge).detail
    damaged = data.replace(b"av01", b"av00")
    assert refused(damaged).reason == "unreadable"


def test_a_file_that_is_no_image_is_unreadable_whatever_its_name(tmp_path):
    (tmp_path / "a.png").write_text("not an image at all\n")
    for path in (tmp_path / "a.png", tmp_path / "absent.png", tmp_path):
        with pytest.raises(ImageError) as error:
            probe(path)
        assert error.value.reason == "unreadable" and str(tmp_path) not in error.value.detail


def test_reading_changes_no_setting_of_pillow_and_no_warning_filter(tmp_path):
    before = (ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS, list(warnings.filters))
    data = saved(picture())
    Path(tmp_path / "a.png").write_bytes(data)
    with pytest.raises(ImageError):
        probe(io.BytesIO(data[:200]))
    assert open_image(tmp_path / "a.png").tobytes() == picture().tobytes()
    assert (ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS, list(warnings.filters)) == before
