"""Decoding of real files of every format, written by Pillow or byte by byte, intact and damaged."""

import io
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pillow_heif
import pytest
from PIL import Image, ImageCms, ImageFile, ImageOps

from stages.text_to_image.imaging import colour, decode
from stages.text_to_image.imaging.decode import ImageError, open_image, probe
from stages.text_to_image.imaging.room import Room

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


def picture(width=48, height=32):
    """A smooth picture whose corners all differ."""
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    return Image.fromarray(np.stack([x * 200 + 20, y * 200 + 20, (x + y) * 60 + 60], 2).astype(np.uint8))


def saved(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind.split()[0], **options)
    return file.getvalue()


def opened(data, **options):
    return open_image(io.BytesIO(data), **options)


def refused(data):
    with pytest.raises(ImageError) as error:
        probe(io.BytesIO(data))
    return error.value


def png(width, height, depth, colour, rows, *chunks):
    """Build a PNG file byte by byte, for kinds that Pillow does not write. colour: 0 grey, 2 RGB."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunk(*c) for c in chunks) + body + chunk(b"IEND", b"")


def profile(space, *tags):
    """Build an ICC profile of a display, version 2, byte by byte."""
    table, data, at = b"", b"", 132 + 12 * len(tags)
    for name, value in tags:
        value = value.ljust(-(-len(value) // 4) * 4, b"\0")
        table += name + struct.pack(">II", at + len(data), len(value))
        data += value
    size = at + len(data)
    head = struct.pack(">I4sI4s4s4s", size, b"none", 0x02400000, b"mntr", space, b"XYZ ")
    head += bytes(12) + b"acsp" + bytes(28) + struct.pack(">iii", 63190, 65536, 54061)
    return head.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + data


def xyz(*values):
    return b"XYZ " + bytes(4) + struct.pack(">iii", *(round(v * 65536) for v in values))


GAMMA_2 = b"curv" + bytes(4) + struct.pack(">IH", 1, 512)
# A wide gamut, Adobe RGB's primaries adapted to D50; columns of the matrix to XYZ.
WIDE = np.array([[0.60974, 0.20528, 0.14919], [0.31111, 0.62567, 0.06322], [0.01947, 0.06087, 0.74457]])
WIDE_PROFILE = profile(
    b"RGB ", (b"wtpt", xyz(0.9642, 1.0, 0.8249)),
    *((name, xyz(*WIDE[:, k])) for k, name in enumerate((b"rXYZ", b"gXYZ", b"bXYZ"))),
    *((name, GAMMA_2) for name in (b"rTRC", b"gTRC", b"bTRC")),
)  # fmt: skip
GREY_PROFILE = profile(b"GRAY", (b"wtpt", xyz(0.9642, 1.0, 0.8249)), (b"kTRC", b"curv" + bytes(4) + struct.pack(">IH", 1, 256)))
SRGB_D50 = np.array([[0.43607, 0.38515, 0.14307], [0.22249, 0.71687, 0.06061], [0.01392, 0.09708, 0.71410]])


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


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP lossless", "JPEG", "AVIF", "HEIF"])
def test_every_orientation_is_turned_upright_and_the_probe_has_the_upright_size(kind, orientation):
    exif = Image.Exif()
    exif[decode.ORIENTATION] = orientation
    data = saved(picture(), kind, **(FORMATS[kind] | {"exif": exif.tobytes()}))
    upright = picture()
    upright.getexif()[decode.ORIENTATION] = orientation
    upright = ImageOps.exif_transpose(upright)
    found = probe(io.BytesIO(data))
    image = opened(data)
    assert image.size == upright.size == (found.width, found.height)
    assert np.abs(np.asarray(image, float) - np.asarray(upright, float)).mean() < 3


def test_an_image_with_a_broken_exif_block_is_not_turned():
    data = saved(picture(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert opened(data).size == (48, 32)


def test_a_wide_gamut_profile_is_converted_as_the_formula_says():
    image = Image.fromarray(np.array([[[90, 140, 120], [128, 128, 128], [255, 255, 255], [160, 110, 70]]], np.uint8))
    plain = np.asarray(image, float) / 255
    linear = np.clip(plain**2 @ WIDE.T @ np.linalg.inv(SRGB_D50).T, 0, 1)
    expected = np.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055) * 255
    assert np.abs(expected - plain * 255).max() > 5
    for found in (opened(saved(image, icc_profile=WIDE_PROFILE)), opened(saved(image.convert("RGBA"), icc_profile=WIDE_PROFILE))):
        assert np.abs(np.asarray(found, float) - expected).max() <= 1.5


def test_a_grey_profile_applies_to_grey_pixels_of_8_and_16_bits_and_is_ignored_for_colour():
    grey = Image.new("L", (4, 4), 64)  # the profile is linear: 0.25 of the light is 137 in sRGB
    assert abs(opened(saved(grey, icc_profile=GREY_PROFILE)).getpixel((0, 0))[0] - 137) <= 2
    deep = Image.fromarray(np.full((4, 4), 64 * 257, np.uint16))
    assert abs(opened(saved(deep, "TIFF", icc_profile=GREY_PROFILE)).getpixel((0, 0))[0] - 137) <= 2
    assert opened(saved(picture(), icc_profile=GREY_PROFILE)).tobytes() == picture().tobytes()


@pytest.mark.parametrize("broken", [b"", b"no profile", WIDE_PROFILE[:200], WIDE_PROFILE[:128] + bytes(400)])
def test_a_broken_profile_is_ignored(broken):
    assert opened(saved(picture(), icc_profile=broken)).tobytes() == picture().tobytes()


def test_sixteen_bits_are_scaled_to_eight_and_not_clipped():
    deep = np.linspace(0, 65535, 256 * 4).reshape(4, 256).astype(np.uint16)
    for kind in ("PNG", "TIFF"):
        found = np.asarray(opened(saved(Image.fromarray(deep), kind)))
        assert np.array_equal(found, np.repeat(np.rint(deep / 257)[..., None], 3, 2))
    dark = np.asarray(opened(saved(Image.fromarray(np.full((4, 4), 700, np.uint16)))))
    assert dark.max() == 3  # 700 of 65535; convert() would say white
    rgb = png(2, 1, 16, 2, [struct.pack(">6H", 65535, 32896, 0, 257, 514, 65535)])
    assert np.asarray(opened(rgb)).tolist() == [[[255, 128, 0], [1, 2, 255]]]


@pytest.mark.parametrize("white", [1.0, 255.0, 65535.0])
def test_float_pixels_are_scaled_by_the_smallest_usual_range_that_holds_them(white):
    values = np.linspace(0, white, 64, dtype=np.float32).reshape(8, 8)
    values[0, 0] = np.nan
    found = np.asarray(opened(saved(Image.fromarray(values), "TIFF")))
    assert np.array_equal(found[..., 0], np.rint(np.linspace(0, 255, 64).reshape(8, 8)))


def test_thirty_two_bit_integers_are_scaled():
    values = np.array([[0, 2**31 - 1, 2**30]], np.int32)
    assert np.asarray(opened(saved(Image.fromarray(values), "TIFF")))[..., 0].tolist() == [[0, 255, 128]]


def tiff(values):
    """A TIFF file of one grey channel, as tifffile and ImageJ write it, also in kinds that Pillow does not write."""
    height, width = values.shape
    form = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    tags = {256: width, 257: height, 258: values.itemsize * 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: height}
    tags |= {279: values.nbytes, 339: form}
    data = values.astype(values.dtype.newbyteorder("<")).tobytes()
    entries = b"".join(struct.pack("<HHII", tag, 4 if tag in (273, 279) else 3, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(tags)) + entries + bytes(4)


def test_floats_a_little_beyond_white_are_clipped_and_not_taken_for_a_dark_image():
    values = np.linspace(0, 1.05, 64, dtype=np.float32).reshape(8, 8)
    found = np.asarray(opened(tiff(values)))[..., 0]
    assert np.array_equal(found, np.rint(np.clip(values.astype(float), 0, 1) * 255))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.linspace(0, 12, 64, dtype=np.float32), "from 0 to 12, and white is unclear"),
        (np.linspace(-1, 1, 64, dtype=np.float32), "from -1 to 1, and white is unclear"),
        (np.array([0, np.inf] * 32, np.float32), "from 0 to inf, and white is unclear"),
        (np.linspace(0, 70000, 64).astype(np.int32), "from 0 to 70000, and white is unclear"),
        (np.linspace(0, 70000, 64).astype(np.uint32), "from 0 to 70000, and white is unclear"),
        (np.linspace(-9, 4000, 64).astype(np.int16), "from -9 to 4000, and white is unclear"),
    ],
)
def test_pixels_of_no_usual_range_are_refused_with_the_range(values, said):
    for read in (probe, open_image):
        with pytest.raises(ImageError, match=said) as error:
            read(io.BytesIO(tiff(values.reshape(8, 8))))
        assert error.value.reason == "range"


@pytest.mark.parametrize(
    ("kind", "white"),
    [(np.uint32, 2**32 - 1), (np.int32, 2**31 - 1), (np.int32, 65535), (np.uint16, 65535), (np.int16, 32767), (np.int32, 255)],
)
def test_whole_numbers_of_every_width_and_sign_are_scaled(kind, white):
    values = np.linspace(0, white, 64).astype(kind).reshape(8, 8)
    found = np.asarray(opened(tiff(values)))[..., 0]
    assert np.array_equal(found, np.rint(values.astype(np.float64) / white * 255))


def test_an_image_of_many_strips_is_scaled_as_one_of_one(monkeypatch):
    values = (np.arange(64 * 50, dtype=np.uint16) * 20).reshape(50, 64)
    whole = opened(saved(Image.fromarray(values), transparency=400)).tobytes()
    monkeypatch.setattr(colour, "STRIP", 64 * 7)
    assert opened(saved(Image.fromarray(values), transparency=400)).tobytes() == whole


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


def test_transparency_shows_the_background_in_every_mode():
    half = Image.new("RGBA", (8, 8), (200, 100, 0, 128))
    half.paste((255, 0, 0, 0), (0, 0, 4, 8))
    assert opened(saved(half)).getpixel((0, 0)) == (255, 255, 255)
    assert np.allclose(opened(saved(half), background="#000000").getpixel((7, 7)), (100, 50, 0), atol=1)
    assert opened(saved(half), background="rgb(0, 0, 255)").getpixel((0, 0)) == (0, 0, 255)
    assert opened(saved(half.convert("LA")), background="#00ff00").getpixel((0, 0)) == (0, 255, 0)
    for kind in ("GIF", "PNG"):
        flat = Image.new("P", (8, 8), 1)
        flat.putpalette([255, 0, 0, 0, 0, 255])
        flat.paste(0, (0, 0, 4, 8))
        data = saved(flat, kind, transparency=0)
        assert opened(data, background="#123456").getpixel((0, 0)) == (0x12, 0x34, 0x56)
        assert opened(data).getpixel((7, 7)) == (0, 0, 255)
    assert opened(saved(Image.new("RGB", (4, 4), "red"), transparency=(255, 0, 0))).getpixel((0, 0)) == (255, 255, 255)
    grey = png(2, 1, 16, 0, [struct.pack(">2H", 700, 65535)], (b"tRNS", struct.pack(">H", 700)))
    assert opened(grey, background="#0000ff").getpixel((0, 0)) == (0, 0, 255)
    assert opened(grey, background="#0000ff").getpixel((1, 0)) == (255, 255, 255)


def test_other_modes_become_rgb():
    red = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    assert np.allclose(opened(saved(red, "JPEG", quality=100)).getpixel((4, 4)), (254, 0, 0), atol=4)
    assert opened(saved(Image.new("1", (8, 8), 1))).getpixel((0, 0)) == (255, 255, 255)
    assert opened(saved(Image.new("L", (8, 8), 77))).getpixel((0, 0)) == (77, 77, 77)
    spaces = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    lab = ImageCms.profileToProfile(Image.new("RGB", (8, 8), "red"), *spaces, outputMode="LAB")
    found = opened(saved(lab, "TIFF")).getpixel((0, 0))
    assert found[0] > 240 and max(found[1:]) < 40
    ycc = saved(picture().convert("YCbCr"), "TIFF", compression="raw")
    assert np.abs(np.asarray(opened(ycc), float) - np.asarray(picture(), float)).mean() < 2


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


def test_heic_without_its_plug_in_is_unsupported_and_the_error_names_the_remedy(monkeypatch):
    monkeypatch.setattr(decode, "_register_heif", lambda: False)
    found = refused(saved(picture(), "HEIF"))
    assert found.reason == "unsupported" and "pip install pillow-heif" in found.detail
    assert probe(io.BytesIO(saved(picture(), "AVIF"))).format == "AVIF"


def test_a_file_that_is_no_image_is_unreadable_whatever_its_name(tmp_path):
    (tmp_path / "a.png").write_text("not an image at all\n" * 10)
    for path in (tmp_path / "a.png", tmp_path / "absent.png", tmp_path):
        with pytest.raises(ImageError) as error:
            probe(path)
        assert error.value.reason == "unreadable" and str(tmp_path) not in error.value.detail


def test_a_background_that_is_no_colour_is_a_wrong_setting_and_not_a_bad_image(tmp_path):
    picture().save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r'background must be a colour, .*, got "whyte"') as error:
        open_image(tmp_path / "a.png", "whyte")
    assert not isinstance(error.value, ImageError)


def test_reading_changes_no_setting_of_pillow_and_no_warning_filter(tmp_path):
    before = (ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS, list(warnings.filters))
    data = saved(picture())
    Path(tmp_path / "a.png").write_bytes(data)
    with pytest.raises(ImageError):
        probe(io.BytesIO(data[:200]))
    assert open_image(tmp_path / "a.png").tobytes() == picture().tobytes()
    assert (ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS, list(warnings.filters)) == before
