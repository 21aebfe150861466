"""The stage checks: the thresholds on planted sets, and what becomes a warning."""

from __future__ import annotations

import shutil
from collections.abc import Iterable

import numpy as np
import pytest
from PIL import Image, ImageOps

from pipeline.project.project import Project
from stages.text_to_image.checks import SIDE, ChecksConfig, imbalance, measure_picture, near_pairs, repeated_phrase, text_warnings
from tests.projects import Silent, build, duplicate, edit, make
from tests.stages.text_to_image.checks import planted

USUAL = ChecksConfig()


def thumbnail(image: Image.Image) -> np.ndarray:
    return np.frombuffer(measure_picture(image.convert("L"))["thumbnail"], np.uint8).reshape(SIDE, SIDE)


@pytest.mark.proof("near-duplicates: recall at least 0.95 at precision at least 0.98 among 2,000 different pictures")
def test_near_duplicates_are_found_and_different_pictures_are_not(cases):
    count, copies = cases(120, 2000), cases(10, 200)
    originals = list(planted.different(count))
    chosen = np.random.default_rng(0).choice(len(originals), copies, replace=False)
    groups, pictures = list(range(len(originals))), list(originals)
    for change in planted.CHANGES.values():
        pictures += [change(originals[n]) for n in chosen]
        groups += chosen.tolist()
    pairs = near_pairs(np.stack([thumbnail(each) for each in pictures]), USUAL.similarity)
    right = [groups[i] == groups[j] for i, j, _ in pairs]
    found = {j for (i, j, _), good in zip(pairs, right, strict=True) if good and i == groups[j]}
    assert np.mean(right) >= 0.98
    assert len(found) >= 0.95 * copies * len(planted.CHANGES)


def test_pictures_without_a_near_duplicate_give_no_pair():
    generator = np.random.default_rng(1)
    for count in (0, 1, 60):
        assert near_pairs(generator.integers(0, 256, (count, SIDE, SIDE), dtype=np.uint8), USUAL.similarity) == []
    stripes = np.zeros((2, SIDE, SIDE), np.uint8)
    stripes[0, ::4] = stripes[1, 1::4] = 255  # equal hashes of their coarse parts, and no correlation
    assert near_pairs(stripes, USUAL.similarity) == []


def grey(measure: str, pictures: Iterable[Image.Image]) -> list[float]:
    return [measure_picture(image.convert("L"))[measure] for image in pictures]


def test_a_threshold_separates_sharp_pictures_from_blurred_ones():
    sharp = grey("blur", planted.real())
    for radius in (2, 6):
        blurred = grey("blur", (planted.blurred(image, radius) for image in planted.photographs()))
        assert max(sharp) < USUAL.blur <= min(blurred), radius


def test_badly_exposed_photographs_are_darker_or_brighter_than_usual_ones():
    usual = grey("brightness", planted.photographs())
    for gain, sign in ((0.05, -1), (8, 1)):
        marked = grey("brightness", (planted.exposed(image, gain) for image in planted.photographs()))
        # The share of pairs in which the marked picture is farther out.
        assert np.mean([sign * m > sign * n for n in usual for m in marked]) >= 0.9


def test_a_letterbox_is_a_border_and_the_ground_of_a_drawing_is_none():
    assert max(grey("border", planted.real())) == 0
    boxed = [ImageOps.expand(image, (0, int(image.height * 0.15))) for image in planted.photographs()[1:]]
    found = grey("border", boxed)
    assert np.median(found) == pytest.approx(0.23, abs=0.01) and sum(each >= USUAL.border for each in found) >= len(found) - 1


def named(trigger: str, *texts: str | tuple[str, str]) -> list[tuple[int, str]]:
    """(number, warning) of captions, which have another source than a sidecar if it is given."""
    given = [each if isinstance(each, tuple) else (each, "sidecar") for each in texts]
    rows = [{"image_id": n, "text": text, "source": source} for n, (text, source) in enumerate(given)]
    return sorted((image, name) for image, name, _ in text_warnings(rows, trigger, USUAL.words))


def test_captions_that_repeat_each_other_or_lack_the_trigger_or_are_broken_are_named():
    found = named(
        "ohwx",
        "ohwx, a red boat on the calm sea",
        "Ohwx, a red boat on the calm sea!",
        "ohwx, a blue boat on the calm sea",
        "a quite different text without it",
        "ohwx in a cafÃ©",
        "ohwx " + "very " * 400,
        *[("ohwx", "config")] * 2,  # captions.missing = "trigger"
    )
    equal = [(1, "equal_caption"), (1, "no_trigger"), (2, "near_caption")]
    assert found == [*equal, (3, "no_trigger"), (4, "mojibake"), (5, "long_caption")]
    assert named("art", "a party", "art, a house") == [(0, "no_trigger")], "within a longer word"
    assert named("", "café à Âge d’or", "日本 の 猫", "кошка на столе", "Ærø “zwj” — ñandú") == [], "other scripts"


def test_a_phrase_in_most_captions_is_named_without_the_trigger():
    def repeated(text: str, trigger: str) -> str:
        return repeated_phrase([{"text": text.format(n)} for n in range(8)], trigger, 0.5)

    told = repeated("ohwx thing, a photo of the number {} on a table", "ohwx thing")
    assert told.startswith("8 of 8 different captions have the phrase")
    assert repeated("ohwx thing here and there {}", "ohwx thing") == ""
    assert "'a party in the hall'" in repeated("{} a party in the hall", "art")


def test_folders_of_very_different_size_are_named_unless_repeats_balance_them():
    def rows(repeats: float | None) -> list[dict[str, object]]:
        small = {"path": "a/x.png", "folder": None, "use": None, "weight": None, "repeats": repeats}
        return [small, *[small | {"path": f"b/{n}.png", "repeats": None} for n in range(30)]]

    assert imbalance(rows(None), 10.0).startswith("folder b/ occurs 30 times per epoch, a/ 1 times")
    assert imbalance(rows(30.0), 10.0) == ""


@pytest.fixture(scope="module")
def built(tmp_path_factory, tiny_weights):
    folder = make(tmp_path_factory.mktemp("built") / "project", tiny_weights, images=3)
    with Image.open(folder / "images" / "picture0.png") as image:
        planted.encoded(image.convert("RGB")).save(folder / "images" / "again.png")
    (folder / "images" / "again.txt").write_text("picture number 0")
    build(folder, "images", "captions", "checks")
    return folder


@pytest.fixture
def project(built, tmp_path):
    return duplicate(built, tmp_path / "project")


def checks(folder):
    return {row["path"]: row for row in Project(folder).current("checks").rows().to_pylist()}


def test_a_picture_saved_again_and_an_equal_caption_are_warnings_and_exclude_nothing(project):
    console = Silent()
    shutil.rmtree(project / "tables" / "checks")
    build(project, "images", "captions", "checks", "buckets", console=console)
    rows = checks(project)
    pair = {"again.png", "picture0.png"}
    marked = {path for path in pair if rows[path]["duplicate_of"]}
    assert len(marked) == 1 and rows[marked.pop()]["duplicate_of"] in {rows[path]["image_id"] for path in pair}
    assert any("nearly the same as a larger image" in line for line in console.lines)
    assert any("1 image with the caption of another image" in line for line in console.lines)
    assert not {row["rejected"] for row in Project(project).current("buckets").rows().to_pylist()} - {None, "same_crop"}


def test_a_deleted_original_leaves_no_warning_and_no_picture_is_measured_again(project, monkeypatch):
    marked = next(path for path, row in checks(project).items() if row["duplicate_of"])
    original = ({"again.png", "picture0.png"} - {marked}).pop()
    (project / "images" / original).unlink()
    monkeypatch.setattr("stages.text_to_image.checks.measure", None)
    build(project, "images", "captions", "checks")
    assert checks(project)[marked]["duplicate_of"] is None and "near_duplicate" not in checks(project)[marked]["warnings"]


def test_a_condition_in_sql_chooses_the_images_that_are_trained(project):
    edit(project, "[buckets]\n", '[buckets]\nwhere = "duplicate_of is null"\n')
    console = Silent()
    build(project, "buckets", console=console)
    rows = Project(project).current("buckets").rows().to_pylist()
    left_out = {row["image_id"] for row in rows if row["rejected"] == "where"}
    assert left_out == {row["image_id"] for row in checks(project).values() if row["duplicate_of"]}
    assert "1 image left out by buckets.where: duplicate_of is null" in console.lines


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("blurr < 0.5", r'buckets\.where must be an SQL condition such as "blur < 0\.6", got "blurr < 0\.5": .*blurr.*blur'),
        ("blur <", r"buckets\.where must be an SQL condition .*syntax error"),
        ("blur < 0", r'buckets\.where: none of the 4 images meets "blur < 0"; see latentmill lint'),
        ("(select count(*) from read_csv('/etc/passwd')) > 0", r"buckets\.where must be .*disabled"),
        ("true) or (true; drop table images --", r"buckets\.where must be"),
    ],
)
def test_a_wrong_condition_is_one_line(project, where, message):
    edit(project, "[buckets]\n", f'[buckets]\nwhere = "{where}"\n')
    with pytest.raises(ValueError, match=message) as caught:
        build(project, "buckets")
    assert "\n" not in str(caught.value)


def test_a_condition_without_the_table_checks_names_the_command(project):
    shutil.rmtree(project / "tables" / "checks")
    edit(project, "[buckets]\n", '[buckets]\nwhere = "blur < 0.5"\n')
    with pytest.raises(ValueError, match="make checks"):
        build(project, "buckets")
