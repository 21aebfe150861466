"""Decoding beside other programs: the comparison itself, and its result for the test images of Pillow, libheif and libvips."""

import importlib.util
import io
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.bench import decoding

IMAGES = os.environ.get("LATENTMILL_TEST_IMAGES", "")  # a folder with Pillow's Tests, libheif, and libvips' test
LEAST = 400  # files that libvips and we decode without conversion; fewer means that the folder is not complete


def test_chroma_of_half_the_resolution_is_interpolated_between_its_samples_and_continued_at_the_border():
    plane = np.array([[0.0, 4.0, 8.0]])
    assert decoding.bilinear(plane, 6, 1).tolist() == [[0, 1, 3, 5, 7, 8]]
    assert decoding.bilinear(plane, 5, 1).tolist() == [[0, 1, 3, 5, 7]]
    assert decoding.bilinear(plane.T, 6, 0).tolist() == [[0], [1], [3], [5], [7], [8]]


def test_a_file_counts_as_equal_only_within_two_levels_of_a_reference_that_is_named_and_in_the_share_without_conversion(
    tmp_path, monkeypatch
):
    file = tmp_path / "a.png"
    Image.new("RGB", (4, 4), (100, 100, 100)).save(file)
    pixels = decoding.ours(file)

    def result(libvips, other=None, conversion=""):
        monkeypatch.setattr(decoding, "theirs", lambda path: (libvips, conversion))
        monkeypatch.setattr(decoding, "OTHERS", {"another": lambda path: other})
        return decoding.compare(file)

    assert result(pixels + 2) == "equal" and result(pixels + 3) == "differs" and result(pixels[:3]) == "differs"
    assert result(pixels + 3, pixels + 2) == "equal to another" and result(pixels + 3, pixels + 3) == "differs"
    assert result(pixels + 3, pixels + 3, "ICC") == "differs, ICC"
    assert result(None) == "only ours" and result(None, pixels) == "only ours, equal to another"
    file.write_bytes(b"no image")
    assert result(pixels) == "only theirs" and result(None) == "both refuse"
    counts = Counter({"equal": 5, "equal to another": 2, "differs": 1, "differs, ICC": 9, "only ours, equal to another": 9})
    assert decoding.shares(counts) == (5, 7, 8), "of those that both decode without conversion"


def test_an_avif_file_with_chroma_of_half_the_resolution_is_decoded_as_the_planes_of_ffmpeg_interpolated(tmp_path):
    pytest.importorskip("av")
    y, x = np.mgrid[0:1:36j, 0:1:52j]
    picture = Image.fromarray(np.stack([x * 200, y * 200, 255 - x * 200], 2).astype(np.uint8))
    data = io.BytesIO()
    picture.save(data, "AVIF", quality=90, subsampling="4:2:0")
    (tmp_path / "a.avif").write_bytes(data.getvalue())
    other = decoding.with_bilinear_chroma(tmp_path / "a.avif")
    assert other is not None and decoding.equal(decoding.ours(tmp_path / "a.avif"), other)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:PIL", "ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.proof("of the test images of Pillow, libheif and libvips, 99 in 100 decode as libvips or another reference does")
@pytest.mark.skipif(not IMAGES or not importlib.util.find_spec("pyvips"), reason="needs LATENTMILL_TEST_IMAGES and pyvips")
def test_of_all_test_images_99_in_100_decode_as_a_reference_does_and_each_other_one_has_a_reason(request):
    counts: Counter[str] = Counter()
    apart = {}
    for path in sorted(each for each in Path(IMAGES).rglob("*") if each.is_file()):
        counts[result := decoding.compare(path)] += 1
        if result == "differs":
            apart[path.name] = decoding.REASONS.get(path.name)
    libvips, references, plain = decoding.shares(counts)
    request.node.user_properties += [("cases", plain), ("equal_to_libvips", libvips), ("equal_to_a_reference", references)]
    request.node.user_properties += [("of", dict(counts.most_common())), ("apart", apart)]
    assert plain >= LEAST and references >= 0.99 * plain
    assert all(apart.values()), f"without a reason: {sorted(name for name, reason in apart.items() if not reason)}"
