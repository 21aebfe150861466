"""Properties of the bucket rule over all image sizes, and the stage buckets over tables in memory."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.text_to_image import IMAGES
from stages.text_to_image.buckets import LONGEST, STAGE, STEP, BucketsConfig, choose_bucket
from tests.harness import context, rows_of, run

SIDES = st.integers(16, 6000)
RESOLUTIONS = st.sampled_from([64, 256, 512, 768, 1024])
SHAPES = st.sampled_from([1, 2, 9, 256])


def images(*sizes, rejected=()):
    """Usable images of these sizes, with the ids 0, 1, ..., then one rejected image per reason."""
    rows = []
    for number, (width, height, reason) in enumerate([*((*s, None) for s in sizes), *((9, 9, r) for r in rejected)]):
        rows.append({"image_id": str(number), "width": width, "height": height, "rejected": reason})
    return rows_of(IMAGES, *rows)


def computed(tmp_path, table, **config):
    made = context(STAGE, tmp_path, {"images": table}, config=BucketsConfig(**config))
    return run(STAGE, made).to_pylist()


@settings(deadline=None, max_examples=80)
@given(SIDES, SIDES, RESOLUTIONS, st.booleans(), SHAPES)
def test_a_bucket_is_on_the_grid_within_its_area_its_crop_has_its_aspect_ratio_and_turning_the_image_turns_it(
    width, height, R, upscale, max_shapes
):
    b = choose_bucket(width, height, R, upscale, max_shapes)
    assert b is not None
    assert b.width % STEP == 0 and b.height % STEP == 0 and min(b.width, b.height) >= STEP
    assert b.width * b.height <= R * R and b.tokens == b.width * b.height // 256
    assert b.crop_x >= 0 and b.crop_x + b.crop_w <= width + 1e-9
    assert b.crop_y >= 0 and b.crop_y + b.crop_h <= height + 1e-9
    assert math.isclose(b.crop_x * 2 + b.crop_w, width) and math.isclose(b.crop_y * 2 + b.crop_h, height)  # centred
    assert b.crop_w == width or b.crop_h == height  # no more than needed
    assert math.isclose(b.width / b.crop_w, b.height / b.crop_h, rel_tol=1e-12)  # nothing is stretched
    assert math.isclose(b.scale, b.width / b.crop_w, rel_tol=1e-12)
    assert math.isclose(b.crop_loss, 1 - b.crop_w * b.crop_h / (width * height), abs_tol=1e-12)
    if not upscale:
        assert b.scale <= 1 and b.width <= width and b.height <= height
    turned = choose_bucket(height, width, R, upscale, max_shapes)
    assert (turned.width, turned.height, turned.crop_w, turned.crop_h) == (b.height, b.width, b.crop_h, b.crop_w)


@settings(deadline=None, max_examples=50)
@given(st.integers(64, 6000), st.integers(64, 6000))
def test_a_higher_resolution_never_gives_noticeably_fewer_tokens(width, height):
    """Exactly monotone it is not: a small image's own shape may crop less and be a few cells smaller."""
    tokens = [choose_bucket(width, height, R).tokens for R in (256, 384, 512, 768, 1024)]
    assert all(later >= earlier * 0.85 for earlier, later in itertools.pairwise(tokens))


@settings(deadline=None, max_examples=50)
@given(st.integers(64, 6000), st.floats(1 / LONGEST, LONGEST), RESOLUTIONS)
def test_an_image_with_enough_pixels_is_trained_at_full_area(side, aspect, R):
    width, height = round(side * aspect**0.5), round(side * aspect**-0.5)
    b = choose_bucket(width, height, R, upscale=True)
    longest = math.sqrt(max(aspect, 1 / aspect) + 0.5)
    assert b.width * b.height > R * R - R * STEP * longest * 1.2  # at most about one row or column of cells is missing
    assert choose_bucket(8 * width, 8 * height, R, upscale=True).tokens > 0.8 * b.tokens


def log_uniform(count=2000, longest=2.0):
    return np.exp(np.random.default_rng(0).uniform(-np.log(longest), np.log(longest), count))


@pytest.mark.parametrize(("R", "mean", "p95", "shapes"), [(512, 1.6, 3.1, 30), (768, 1.0, 2.0, 40), (1024, 0.75, 1.6, 54)])
def test_little_is_cropped_away_and_shapes_are_few(R, mean, p95, shapes):
    found = [choose_bucket(round(4000 * a**0.5), round(4000 * a**-0.5), R) for a in log_uniform()]
    loss = 100 * np.array([b.crop_loss for b in found])
    assert loss.mean() <= mean and np.quantile(loss, 0.95) <= p95
    assert len({(b.width, b.height) for b in found}) <= shapes
    assert np.mean([b.tokens for b in found]) > 0.98 * (R / STEP) ** 2


def test_a_panorama_of_four_to_one_is_not_cropped():
    for R in (512, 768, 1024):
        for width, height in ((8000, 2000), (2000, 8000)):
            b = choose_bucket(width, height, R)
            assert b.crop_loss == 0 and max(b.width, b.height) == 4 * min(b.width, b.height) == 2 * R
    assert choose_bucket(8191, 2047, 1024).crop_loss < 0.001
    assert choose_bucket(16000, 1000, 1024).width <= LONGEST * choose_bucket(16000, 1000, 1024).height  # beyond 8:1 it is cropped


def test_a_small_image_keeps_its_own_size_and_is_enlarged_only_when_asked():
    assert (choose_bucket(600, 400, 768).width, choose_bucket(600, 400, 768).height) == (592, 400)
    assert choose_bucket(600, 400, 768).scale == 1.0
    assert choose_bucket(600, 400, 768, upscale=True).tokens > 0.97 * 48 * 48
    rng = np.random.default_rng(1)
    kept = [
        (b.width * b.height) / (w * h) for w, h in rng.integers(128, 512, (400, 2)) for b in [choose_bucket(int(w), int(h), 768)]
    ]
    assert np.mean(kept) > 0.88 and min(kept) > 0.75
    assert choose_bucket(15, 900, 512) is None


@pytest.mark.parametrize("max_shapes", [1, 9])
def test_the_number_of_shapes_is_bounded_for_large_images_and_for_small_ones(max_shapes):
    large = [choose_bucket(round(4000 * a**0.5), round(4000 * a**-0.5), 512, max_shapes=max_shapes) for a in log_uniform(700, 10)]
    assert len({(b.width, b.height) for b in large}) <= max_shapes
    sides = np.random.default_rng(2).integers(16, 700, (700, 2))
    small = [choose_bucket(int(w), int(h), 512, max_shapes=max_shapes) for w, h in sides]
    assert len({(b.width, b.height) for b in small}) <= max_shapes * 512 // STEP
    if max_shapes == 1:
        assert all(b.width == b.height for b in large + small)


def test_every_image_has_a_row_per_resolution_and_a_resolution_with_the_same_crop_is_rejected(tmp_path):
    found = computed(tmp_path, images((2000, 1500), (600, 400), (256, 256), (300, 12), rejected=["truncated"]))
    verdicts = {(row["image_id"], row["resolution"]): row["rejected"] for row in found}
    assert verdicts == {
        ("0", 512): None, ("0", 768): None,
        ("1", 512): None, ("1", 768): "same_crop",
        ("2", 512): None, ("2", 768): "same_crop",
        ("3", 512): "too_small", ("3", 768): "too_small",
    }  # fmt: skip
    assert all(row["width"] == row["tokens"] == 0 for row in found if row["rejected"] == "too_small")


def test_rows_do_not_depend_on_the_order_of_the_resolutions_and_a_single_resolution_is_never_rejected(tmp_path):
    table = images((600, 400), (2000, 900))
    assert computed(tmp_path, table, resolutions=(768, 512)) == computed(tmp_path, table, resolutions=(512, 768))
    assert [row["rejected"] for row in computed(tmp_path, table, resolutions=(768,))] == [None, None]
    assert [row["rejected"] for row in computed(tmp_path, table, upscale=True)] == [None] * 4


def test_the_summary_of_each_resolution_is_given_once_and_only_for_new_rows(tmp_path):
    lines = []
    table = images((2000, 1500), (600, 400), (100, 80))
    made = context(STAGE, tmp_path, {"images": table}, config=BucketsConfig())
    made.report.say = lines.append
    stored = run(STAGE, made)
    assert lines[0].startswith("512: 3 images in 3 shapes, ")
    assert lines[0].endswith("% cropped away on average; 1 with less than a quarter of that area, at their own size")
    assert lines[1].startswith("768: 1 image in 1 shape, ") and len(lines) == 2
    again = context(STAGE, tmp_path, {"images": table}, config=BucketsConfig(), stored=stored)
    again.report.say = lines.append
    run(STAGE, again)
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"resolutions": (512, 500)}, "resolutions must be multiples of 16, such as 496 or 512, got 500"),
        ({"resolutions": ()}, r"at least one resolution, and none twice, such as \[512, 768\], got \[\]"),
        ({"resolutions": (512, 512)}, r"none twice, .*, got \[512, 512\]"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_it_and_the_remedy(wrong, message):
    with pytest.raises(ValueError, match=message):
        BucketsConfig(**wrong)
