"""Masks: which file is the mask of which image, and what a row holds of the mask."""

import hashlib
import io

import numpy as np
import pytest
from PIL import Image

from stages.text_to_image.imaging import masks
from stages.text_to_image.imaging.decode import open_alpha
from stages.text_to_image.latents import STAGE
from tests.harness import run
from tests.stages.text_to_image.test_latents import made, tables

CROP = {"crop_x": 0.0, "crop_y": 0.0, "crop_w": 64.0, "crop_h": 64.0, "width": 64, "height": 64, "flip": False}


def halves(size=(64, 64), left=255, right=0):
    grey = np.full((size[1], size[0]), right, np.uint8)
    grey[:, : size[0] // 2] = left
    return Image.fromarray(grey)


@pytest.fixture
def weights(tiny_weights):
    return tiny_weights / "vae"


@pytest.fixture
def folder(tmp_path):
    """An image folder of three pictures: one has a mask beside it, one a mask in the folder masks, one no mask."""
    (tmp_path / "images" / "masks").mkdir(parents=True)
    for number, name in enumerate(("beside.png", "inside.jpg", "none.png")):
        noise = np.random.default_rng(number).integers(0, 255, (64, 64, 3), np.uint8)
        Image.fromarray(noise).save(tmp_path / "images" / name)
    halves().save(tmp_path / "images" / "beside.mask.png")
    halves(left=0, right=128).save(tmp_path / "images" / "masks" / "inside.png")
    return tmp_path / "images"


def images_only(folder):
    return tables(folder, ((32, 48), (64, 64)))


def rows(folder, weights, stored=None, **config):
    return run(STAGE, made(folder, folder.parent, weights, images_only(folder), config=config, stored=stored))


def test_a_file_is_a_mask_only_beside_an_image_of_its_name():
    paths = ["a.jpg", "a.mask.png", "b.mask.png", "masks/a.webp", "masks/c.png"]
    paths += ["s/d.png", "masks/s/d.png", "s/masks/d.png", "s/a.mask.png"]
    assert masks.which_are_masks(paths) == {"a.mask.png", "masks/a.webp", "masks/s/d.png", "s/masks/d.png"}
    assert masks.which_are_masks(["masks/a.png", "masks/b.png", "a.mask.txt", "a.png"]) == {"masks/a.png"}


def test_the_mask_beside_an_image_comes_first_then_the_nearest_folder(tmp_path):
    names = ["s/d.mask.jpg", "s/masks/d.png", "masks/s/d.bmp", "masks/s/d.png"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in names:
        assert masks.mask_finder(tmp_path)(["gone.png", "s/d.png"]) == name
        (tmp_path / name).unlink()
    assert masks.mask_finder(tmp_path)(["gone.png", "s/d.png"]) is None


def test_a_token_is_the_mean_over_its_pixels_row_by_row():
    ramp = np.arange(64 * 64, dtype=np.float64).reshape(64, 64) / 16.1
    mask = Image.fromarray(ramp.astype(np.uint8))
    found = np.frombuffer(masks.token_mask(mask, (64, 64), CROP), np.uint8).reshape(4, 4)
    np.testing.assert_allclose(found, np.asarray(mask, np.float64).reshape(4, 16, 4, 16).mean((1, 3)), atol=1)
    mirrored = np.frombuffer(masks.token_mask(mask, (64, 64), CROP | {"flip": True}), np.uint8).reshape(4, 4)
    assert np.array_equal(mirrored, found[:, ::-1])


def test_a_mask_of_another_size_is_cut_at_the_same_place_as_the_image():
    part = CROP | {"crop_x": 32.0, "crop_w": 64.0, "width": 64, "height": 32, "crop_h": 32.0}
    whole = [masks.token_mask(halves((128 // n, 64 // n)), (128, 64), part) for n in (1, 2, 4)]
    assert whole == [bytes([255, 255, 0, 0] * 2)] * 3


def test_a_row_holds_its_mask_and_a_mask_does_not_change_the_latent(folder, weights):
    plain = {(row["image_id"], row["width"]): row for row in rows(folder, weights).to_pylist()}
    ids = {hashlib.sha256((folder / name).read_bytes()).hexdigest(): name for name in ("beside.png", "inside.jpg", "none.png")}
    found = {(ids[r["image_id"]], r["width"], r["flip"]): r for r in rows(folder, weights, mask="file", flip=True).to_pylist()}
    assert found["beside.png", 64, False]["mask"] == bytes([255, 255, 0, 0] * 4)
    assert found["beside.png", 64, True]["mask"] == bytes([0, 0, 255, 255] * 4)
    assert found["inside.jpg", 64, False]["mask"] == bytes([0, 0, 128, 128] * 4)
    assert found["beside.png", 32, False]["mask"] == bytes([255, 0] * 3)
    assert found["none.png", 64, False]["mask"] is None
    assert found["beside.png", 64, False]["mask_id"] == hashlib.sha256((folder / "beside.mask.png").read_bytes()).hexdigest()
    for (_, width, flip), row in found.items():
        assert flip or row["tensor"] == plain[row["image_id"], width]["tensor"]


def test_an_alpha_channel_is_a_mask_and_an_image_without_one_is_trained_in_full(folder, weights):
    image = Image.open(folder / "none.png").convert("RGBA")
    image.putalpha(halves())
    image.save(folder / "none.png")
    images, buckets = (images_only(folder)[name] for name in ("images", "buckets"))
    modes = [row | {"mode": "RGBA" if row["path"] == "none.png" else "RGB", "format": "JPEG"} for row in images.to_pylist()]
    given = {"images": type(images).from_pylist(modes, schema=images.schema), "buckets": buckets}
    made_rows = run(STAGE, made(folder, folder.parent, weights, given, config={"mask": "alpha"})).to_pylist()
    clear = hashlib.sha256((folder / "none.png").read_bytes()).hexdigest()
    found = {(row["image_id"] == clear, row["width"]): (row["mask_id"], row["mask"]) for row in made_rows}
    assert found[True, 64] == ("alpha", bytes([255, 255, 0, 0] * 4))
    assert found[False, 64] == ("", None)


def test_opacity_is_read_from_every_kind_of_transparency_and_turned_upright():
    def saved(image, form, **more):
        out = io.BytesIO()
        image.save(out, form, **more)
        out.seek(0)
        return out

    palette = Image.fromarray(np.array([[0, 1], [1, 1]], np.uint8), "P")
    palette.putpalette([0, 0, 0, 255, 255, 255])
    assert np.asarray(open_alpha(saved(palette, "PNG", transparency=0))).tolist() == [[0, 255], [255, 255]]
    assert open_alpha(saved(Image.new("RGB", (4, 4)), "PNG")) is None
    assert open_alpha(saved(Image.new("L", (4, 4)), "JPEG")) is None
    exif = Image.Exif()
    exif[0x0112] = 6
    wide = Image.merge("RGBA", [halves((4, 2))] * 4)
    assert np.asarray(open_alpha(saved(wide, "PNG", exif=exif))).tolist() == [[255, 255], [255, 255], [0, 0], [0, 0]]


def test_a_mask_that_cannot_be_used_is_the_reason_in_its_images_rows(folder, weights):
    mask = folder / "beside.mask.png"
    mask.write_bytes(b"no picture")
    for reason in ("its mask beside.mask.png: no image in a known format", "beside.mask.png is 32 x 64, the image 64 x 64"):
        made_rows = rows(folder, weights, mask="file").to_pylist()
        bad = [row["rejected"] for row in made_rows if row["rejected"]]
        assert len(made_rows) == 6 and len(bad) == 2 and all(reason in each for each in bad)
        halves((32, 64)).save(mask)


def test_a_mask_that_changes_during_a_run_and_masks_that_do_not_exist_are_errors(folder, weights):
    opened = made(folder, folder.parent, weights, images_only(folder), config={"mask": "file"})
    halves(left=9).save(folder / "beside.mask.png")
    with pytest.raises(ValueError, match=r"1 image files changed .*\(beside.png\)"):
        run(STAGE, opened)
    (folder / "beside.mask.png").unlink()
    (folder / "masks" / "inside.png").unlink()
    said = "none of the 3 images has a mask file: for beside.png, write beside.mask.png beside it, or masks/beside.png"
    with pytest.raises(ValueError, match=said):
        rows(folder, weights, mask="file")
