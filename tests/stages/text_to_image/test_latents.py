"""The stage latents: its rows, their values, flips, jitter and masks, and what a changed file does."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from pipeline.project.config import Parser
from pipeline.project.project import Project
from pipeline.project.recipe import settings_of
from schemas.text_to_image import BUCKETS, IMAGES
from stages.text_to_image.families import family
from stages.text_to_image.latents import STAGE, LatentsConfig, latent_id
from stages.text_to_image.train.config import TrainConfig, ValidationConfig
from stages.text_to_image.train.data import load_dataset
from tests import projects
from tests.harness import context, rows_of, run

SIZES = {"wide": (96, 64), "tall": (50, 80), "square": (64, 64)}


@pytest.fixture
def weights(tiny_weights):
    return tiny_weights / "vae"


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i, (name, (width, height)) in enumerate(SIZES.items()):
        y, x = np.mgrid[0:height, 0:width].astype(np.float32)
        waves = [np.sin(x / (3 + i) + c) * np.cos(y / (4 + c)) for c in range(3)]
        pixels = (127.5 + 127.5 * np.stack(waves, -1)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}{('.png', '.jpg', '.webp')[i]}")
    return folder


def tables(folder, resolutions=((32, 48), (48, 32))):
    """The tables images and buckets: every picture cropped to every size, with edges that lie between pixels."""
    images, buckets = [], []
    for path in sorted(path for path in folder.glob("*.*") if ".mask" not in path.name):
        image_id = hashlib.sha256(path.read_bytes()).hexdigest()
        width, height = SIZES.get(path.stem.removeprefix("mirrored_"), (64, 64))
        images.append({"path": path.name, "image_id": image_id, "format": "PNG", "mode": "RGB", "width": width, "height": height})
        for i, (bucket_w, bucket_h) in enumerate(resolutions):
            scale = max(bucket_w / width, bucket_h / height)
            w, h = min(width, bucket_w / scale), min(height, bucket_h / scale)
            place = {"crop_x": (width - w) / 2, "crop_y": (height - h) / 2, "crop_w": w, "crop_h": h, "scale": scale}
            buckets.append({"image_id": image_id, "resolution": 32 + i, "width": bucket_w, "height": bucket_h} | place)
    return {"images": rows_of(IMAGES, *images), "buckets": rows_of(BUCKETS, *buckets)}


def made(folder, tmp_path, weights, given=None, **more):
    config = LatentsConfig(**more.pop("config", {}))
    parts = {"config": config, "family": family("tiny"), "weights": {"autoencoder": weights}, "source": folder}
    return context(STAGE, tmp_path / "out", given or tables(folder), **(parts | more))


def by_id(table):
    return {row["latent_id"]: row for row in table.to_pylist()}


def values(row):
    words = np.array(row["tensor"], np.uint16).reshape(row["shape"])
    return (words.astype(np.uint32) << 16).view(np.float32)


def test_an_image_that_cannot_be_decoded_gives_rejected_rows_and_the_others_have_the_statistics_of_their_values(
    pictures, tmp_path, weights
):
    whole = (pictures / "square.webp").read_bytes()
    (pictures / "square.webp").write_bytes(whole[: len(whole) // 2])
    rows = run(STAGE, made(pictures, tmp_path, weights)).to_pylist()
    bad = [row for row in rows if row["rejected"]]
    assert len(rows) == 6 and len(bad) == 2
    assert all(row["rejected"].startswith("truncated") and row["shape"] == row["tensor"] == [] for row in bad)
    for row in rows:
        if not row["rejected"]:
            expected = [values(row).mean(), values(row).std(), np.abs(values(row)).max()]
            assert [row["mean"], row["std"], row["absmax"]] == pytest.approx(expected, abs=1e-5)


def test_a_file_that_changed_since_it_was_listed_is_an_error_after_the_others_are_encoded(pictures, tmp_path, weights):
    ctx = made(pictures, tmp_path, weights)
    shutil.copy(pictures / "wide.png", pictures / "square.webp")
    (pictures / "tall.jpg").unlink()
    rows = []
    with pytest.raises(ValueError, match=r"2 image files changed .*run images again"):
        for batch in STAGE.run(ctx):
            rows += batch.to_pylist()
    assert [row["rejected"] for row in rows] == [None] * 2


def test_a_rejected_image_or_bucket_has_no_latent(pictures, tmp_path, weights):
    given = tables(pictures)
    buckets, images = given["buckets"].to_pylist(), given["images"].to_pylist()
    buckets[0]["rejected"] = "too_small"
    images[1]["rejected"] = "duplicate"
    given = {"images": rows_of(IMAGES, *images), "buckets": rows_of(BUCKETS, *buckets)}
    assert STAGE.wants(made(pictures, tmp_path, weights, given)).num_rows == 3


def test_flip_adds_the_latents_of_the_mirrored_pictures_and_changes_no_other_row(pictures, tmp_path, weights):
    Image.open(pictures / "wide.png").transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(pictures / "mirrored_wide.png")
    ids = {p.stem: hashlib.sha256(p.read_bytes()).hexdigest() for p in pictures.iterdir()}
    plain = by_id(run(STAGE, made(pictures, tmp_path, weights)))
    both = by_id(run(STAGE, made(pictures, tmp_path, weights, config={"flip": True})))
    assert len(both) == 2 * len(plain) and all(both[key] == row for key, row in plain.items())
    found = {(row["image_id"], row["flip"], row["width"]): values(row) for row in both.values()}
    for width in (32, 48):
        turned, mirrored = found[ids["wide"], True, width], found[ids["mirrored_wide"], False, width]
        np.testing.assert_allclose(turned, mirrored, atol=0.1)
        assert np.abs(turned - found[ids["wide"], False, width]).max() > 0.5


def test_the_key_depends_on_every_value_that_defines_the_crop():
    row = {"image_id": "ab", "width": 32, "height": 48, "crop_x": 0.5, "crop_y": 0.0, "crop_w": 9.0, "crop_h": 9.5, "flip": False}
    for column in row:
        assert latent_id(row | {column: {"image_id": "b", "flip": True}.get(column, 7)}) != latent_id(row), column


def test_transparent_pixels_are_composited_over_the_background(tmp_path, weights):
    folder = tmp_path / "clear"
    folder.mkdir()
    Image.new("RGBA", (64, 64), (255, 0, 0, 0)).save(folder / "clear.png")
    Image.new("RGB", (64, 64), (0, 128, 0)).save(folder / "green.png")
    rows = run(STAGE, made(folder, tmp_path, weights, config={"background": "#008000"})).to_pylist()
    clear, green = (row["tensor"] for row in rows if row["width"] == 32)
    assert clear == green


def test_a_latent_that_is_not_finite_is_a_rejected_row(pictures, tmp_path, weights):
    shutil.copytree(weights, tmp_path / "broken")
    (file,) = (tmp_path / "broken").glob("*.safetensors")
    arrays = load_file(file)
    arrays["encoder.conv_in.weight"][:] = 3e38  # finite, or it is refused when read; its sums are not
    save_file(arrays, file)
    rows = run(STAGE, made(pictures, tmp_path, tmp_path / "broken")).to_pylist()
    assert all("not finite" in row["rejected"] for row in rows)


@pytest.mark.parametrize("wrong", [{"precision": "float16"}, {"background": "whyte"}])
def test_a_wrong_setting_is_an_error_that_names_it(wrong):
    with pytest.raises(ValueError, match=rf"latents\.{next(iter(wrong))} must be"):
        Parser({"latents": LatentsConfig}, lambda key: "project.toml [latents]").section("latents", wrong)


def test_only_latents_that_are_not_exact_have_another_recipe():
    assert settings_of(LatentsConfig()) == settings_of(LatentsConfig(exact=True))
    assert "exact" not in settings_of(LatentsConfig()) and settings_of(LatentsConfig(exact=False))["exact"] is False


COLUMNS = ("crop_x", "crop_y", "crop_w", "crop_h")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> Path:
    """Three images, with two further crops for two of them; the third has a reference image, and so none."""
    made = projects.make(tmp_path_factory.mktemp("jitter") / "project", tiny_weights, images=3)
    (made / "images" / "control").mkdir()
    projects.draw(made / "images" / "control" / "picture0.png", seed=9, size=projects.SIZES[0])
    projects.edit(made, "[train]", "[latents]\njitter = 2\nflip = true\n\n[train]")
    projects.build(made, "images", "captions", "buckets", "latents", "embeddings")
    return made


def test_further_crops_lie_inside_the_crop_have_its_shape_and_differ(folder: Path) -> None:
    project = Project(folder)
    images = {row["image_id"]: row for row in project.current("images").rows().to_pylist()}
    latents = project.current("latents").rows().to_pylist()
    for bucket in project.current("buckets").rows().to_pylist():
        own = [row for row in latents if all(row[name] == bucket[name] for name in ("image_id", "width", "height"))]
        crops = Counter(tuple(row[name] for name in COLUMNS) for row in own)
        assert set(crops.values()) == {2}, "each crop and its mirror image"
        assert len(crops) == (1 if "picture0" in images[bucket["image_id"]]["path"] else 3)
        x, y, w, h = (bucket[name] for name in COLUMNS)
        assert (x, y, w, h) in crops
        for left, top, width, height in crops:
            assert width / height == pytest.approx(w / h) and 0.9 * w <= width <= w
            assert left >= x and top >= y and left + width <= x + w + 1e-6 and top + height <= y + h + 1e-6


def test_a_run_trains_on_further_crops_at_their_resolution_and_measures_none_of_them(folder: Path) -> None:
    run = Project(folder).open("train")
    run.config = TrainConfig(steps=1, validation=ValidationConfig(paths=("picture1.png",)))
    data = load_dataset(run)
    assert Counter(crop.resolution for crop in data.crops) == {64: 2 + 6, 96: 2 + 6}
    assert sorted(crop.resolution for crop in data.held) == [64, 96]
    assert len({crop.latent_id for crop in data.crops}) == len(data.crops)


def test_without_the_setting_only_further_crops_disappear_and_no_latent_is_computed_again(folder: Path) -> None:
    before = {row["latent_id"] for row in Project(folder).current("latents").rows().to_pylist()}
    projects.edit(folder, "jitter = 2", "jitter = 0")
    outcome = projects.build(folder, "latents")["latents"]
    after = {row["latent_id"] for row in Project(folder).current("latents").rows().to_pylist()}
    assert outcome.written == 0 and after < before and len(after) == 4 * 2 * 2
