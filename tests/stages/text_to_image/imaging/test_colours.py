"""Decoded colours: profiles, 16 and 32 bits, floats, transparency and other modes become 8-bit RGB."""

import io
import struct

import numpy as np
import pillow_heif
import pytest
from PIL import Image, ImageCms

from stages.text_to_image.imaging import decode
from stages.text_to_image.imaging.decode import ImageError, open_image, probe
from stages.text_to_image.pages import thumbnail
from tests.stages.text_to_image.imaging.pictures import opened, picture, png, saved

pillow_heif.register_heif_opener()
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")


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


def test_a_broken_profile_is_ignored():
    for broken in (b"", b"no profile", WIDE_PROFILE[:200], WIDE_PROFILE[:128] + bytes(400)):
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


def test_the_page_shows_a_picture_of_sixteen_bits_or_with_transparency_as_it_is_trained(tmp_path):
    deep = Image.fromarray(np.full((8, 8), 32768, np.uint16))
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    for image, grey in ((deep, 128), (clear, 255)):
        image.save(tmp_path / "a.png")
        shown = Image.open(io.BytesIO(thumbnail(tmp_path / "a.png", 4, "#ffffff"))).convert("RGB")
        assert shown.size == (4, 4) and np.abs(np.asarray(shown, float) - grey).max() <= 3
    (tmp_path / "b.png").write_text("no picture")
    with pytest.raises(ValueError, match=r"^no picture that can be read: "):
        thumbnail(tmp_path / "b.png", 4, "#ffffff")


@pytest.mark.parametrize(("most", "white"), [(1.0, 1.0), (1.05, 1.0), (255.0, 255.0), (65535.0, 65535.0)])
def test_float_pixels_are_scaled_by_the_smallest_usual_range_that_holds_them_or_nearly(most, white):
    values = np.linspace(0, most, 64, dtype=np.float32).reshape(8, 8)
    values[0, 0] = np.nan
    found = np.asarray(opened(saved(Image.fromarray(values), "TIFF")))
    assert np.array_equal(found[..., 0], np.rint(np.clip(np.nan_to_num(values).astype(float) / white, 0, 1) * 255))


def tiff(values):
    """A TIFF file of one grey channel, as tifffile and ImageJ write it, also in kinds that Pillow does not write."""
    height, width = values.shape
    form = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    tags = {256: width, 257: height, 258: values.itemsize * 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: height}
    tags |= {279: values.nbytes, 339: form}
    data = values.astype(values.dtype.newbyteorder("<")).tobytes()
    entries = b"".join(struct.pack("<HHII", tag, 4 if tag in (273, 279) else 3, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(tags)) + entries + bytes(4)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.linspace(0, 12, 64, dtype=np.float32), "from 0 to 12"),
        (np.linspace(-1, 1, 64, dtype=np.float32), "from -1 to 1"),
        (np.array([0, np.inf] * 32, np.float32), "from 0 to inf"),
        *((np.linspace(0, 70000, 64).astype(kind), "from 0 to 70000") for kind in (np.int32, np.uint32)),
        (np.linspace(-9, 4000, 64).astype(np.int16), "from -9 to 4000"),
    ],
)
def test_pixels_of_no_usual_range_are_refused_with_the_range(values, said):
    for read in (probe, open_image):
        with pytest.raises(ImageError, match=f"{said}, and white is unclear") as error:
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
    monkeypatch.setattr(decode, "STRIP", 64 * 7)
    assert opened(saved(Image.fromarray(values), transparency=400)).tobytes() == whole


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


def test_a_background_that_is_no_colour_is_a_wrong_setting_and_not_a_bad_image(tmp_path):
    picture().save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r'background must be a colour, .*, got "whyte"') as error:
        open_image(tmp_path / "a.png", "whyte")
    assert not isinstance(error.value, ImageError)
