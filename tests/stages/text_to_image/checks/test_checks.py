"""The stage checks: the thresholds on planted sets, and what becomes a warning."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from pipeline.project.project import Project
from stages.text_to_image.checks import SIDE, ChecksConfig, imbalance, measure_picture, near_pairs, repeated_phrase, text_warnings
from tests.projects import Silent, build, edit, make
from tests.stages.text_to_image.checks import planted

USUAL = ChecksConfig()


def thumbnail(image: Image.Image) -> np.ndarray:
    return np.frombuffer(measure_picture(image.convert("L"))["thumbnail"], np.uint8).reshape(SIDE, SIDE)


def area_under_curve(normal: list[float], marked: list[float]) -> float:
    """The share of pairs in which the marked picture has the larger value: 1 if some threshold separates them."""
    return float(np.mean([(m > n) + 0.5 * (m == n) for n in normal for m in marked]))


@pytest.mark.proof("near-duplicates: recall at least 0.95 at precision at least 0.98 among 2,000 different pictures")
def test_near_duplicates_are_found_and_different_pictures_are_not(cases):
    count, copies = cases(150, 2000), cases(15, 200)
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


def test_a_threshold_separates_sharp_pictures_from_blurred_ones():
    sharp = [measure_picture(image.convert("L"))["blur"] for image in planted.real()]
    for radius in (2, 3, 4, 6):
        blurred = [measure_picture(planted.blurred(image, radius).convert("L"))["blur"] for image in planted.photographs()]
        assert area_under_curve(sharp, blurred) == 1.0
        assert max(sharp) < USUAL.blur <= min(blurred), radius


@pytest.mark.parametrize(("gain", "sign"), [(0.05, -1), (0.02, -1), (8, 1), (16, 1)])
def test_badly_exposed_photographs_are_darker_or_brighter_than_usual_ones(gain, sign):
    usual = [sign * measure_picture(image.convert("L"))["brightness"] for image in planted.photographs()]
    marked = [sign * measure_picture(planted.exposed(image, gain).convert("L"))["brightness"] for image in planted.photographs()]
    assert area_under_curve(usual, marked) >= 0.9


def test_a_letterbox_is_a_border_and_the_ground_of_a_drawing_is_none():
    assert max(measure_picture(image.convert("L"))["border"] for image in planted.real()) == 0
    found = []
    for image in planted.photographs()[1:]:
        boxed = Image.new("RGB", (image.width, int(image.height * 1.3)))
        boxed.paste(image, (0, int(image.height * 0.15)))
        found.append(measure_picture(boxed.convert("L"))["border"])
    assert np.median(found) == pytest.approx(0.23, abs=0.01) and sum(each >= USUAL.border for each in found) >= len(found) - 1


def caption(image: str, text: str, source: str = "sidecar") -> dict[str, str]:
    return {"image_id": image, "text": text, "source": source}


def test_captions_that_repeat_each_other_or_lack_the_trigger_or_are_broken_are_named():
    rows = [
        caption("a", "ohwx, a red boat on the calm sea"),
        caption("b", "Ohwx, a red boat on the calm sea!"),
        caption("c", "ohwx, a blue boat on the calm sea"),
        caption("d", "a quite different text without it"),
        caption("e", "ohwx in a cafÃ©"),
        caption("f", "ohwx " + "very " * 400),
        caption("g", "ohwx", "config"),  # captions.missing = "trigger"
        caption("h", "ohwx", "config"),
    ]
    found = {(image, name) for image, name, _ in text_warnings(rows, "ohwx", USUAL.words)}
    assert found == {
        ("b", "equal_caption"),
        ("b", "no_trigger"),
        ("c", "near_caption"),
        ("d", "no_trigger"),
        ("e", "mojibake"),
        ("f", "long_caption"),
    }


def test_text_in_other_scripts_is_no_mojibake():
    rows = [
        caption(str(n), text) for n, text in enumerate(("café à Âge d’or", "日本 の 猫", "кошка на столе", "Ærø “zwj” — ñandú"))
    ]
    assert not [name for _, name, _ in text_warnings(rows, "", USUAL.words)]


def test_a_trigger_within_a_longer_word_is_a_missing_trigger():
    rows = [
        {"image_id": "a", "text": "a party", "source": "sidecar"},
        {"image_id": "b", "text": "art, a house", "source": "sidecar"},
    ]
    assert [(image, name) for image, name, _ in text_warnings(rows, "art", 300)] == [("a", "no_trigger")]
    rows = [{"text": f"{n} a party in the hall"} for n in range(5)]
    assert "'a party in the hall'" in repeated_phrase(rows, "art", 0.5)


def test_a_phrase_in_most_captions_is_named_without_the_trigger():
    rows = [caption(str(n), f"ohwx thing, a photo of the number {n} on a table") for n in range(8)]
    assert repeated_phrase(rows, "ohwx thing", 0.5).startswith("8 of 8 different captions have the phrase")
    assert repeated_phrase([caption(str(n), f"ohwx thing here and there {n}") for n in range(8)], "ohwx thing", 0.5) == ""


def test_folders_of_very_different_size_are_named_unless_repeats_balance_them():
    def rows(repeats: float | None) -> list[dict[str, object]]:
        small = {"path": "a/x.png", "folder": None, "use": None, "weight": None, "repeats": repeats}
        return [small, *[small | {"path": f"b/{n}.png", "repeats": None} for n in range(30)]]

    assert imbalance(rows(None), 10.0).startswith("folder b/ occurs 30 times per epoch, a/ 1 times")
    assert imbalance(rows(30.0), 10.0) == ""


@pytest.fixture
def project(tmp_path, tiny_weights):
    folder = make(tmp_path / "project", tiny_weights, images=3)
    with Image.open(folder / "images" / "picture0.png") as image:
        planted.encoded(image.convert("RGB")).save(folder / "images" / "again.png")
    (folder / "images" / "again.txt").write_text("picture number 0")
    return folder


def checks(folder):
    return {row["path"]: row for row in Project(folder).current("checks").rows().to_pylist()}


def test_a_picture_saved_again_and_an_equal_caption_are_warnings_and_exclude_nothing(project):
    console = Silent()
    build(project, "images", "captions", "checks", "buckets", console=console)
    rows = checks(project)
    pair = {"again.png", "picture0.png"}
    marked = {path for path in pair if rows[path]["duplicate_of"]}
    assert len(marked) == 1 and rows[marked.pop()]["duplicate_of"] in {rows[path]["image_id"] for path in pair}
    assert any("nearly the same as a larger image" in line for line in console.lines)
    assert any("1 image with the caption of another image" in line for line in console.lines)
    assert not {row["rejected"] for row in Project(project).current("buckets").rows().to_pylist()} - {None, "same_crop"}


def test_a_deleted_original_leaves_no_warning_and_no_picture_is_measured_again(project, monkeypatch):
    build(project, "images", "captions", "checks")
    marked = next(path for path, row in checks(project).items() if row["duplicate_of"])
    original = ({"again.png", "picture0.png"} - {marked}).pop()
    (project / "images" / original).unlink()
    monkeypatch.setattr("stages.text_to_image.checks.measure", None)
    build(project, "images", "captions", "checks")
    assert checks(project)[marked]["duplicate_of"] is None and "near_duplicate" not in checks(project)[marked]["warnings"]


def test_a_condition_in_sql_chooses_the_images_that_are_trained(project):
    build(project, "images", "captions", "checks")
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
    build(project, "images", "captions", "checks")
    edit(project, "[buckets]\n", f'[buckets]\nwhere = "{where}"\n')
    with pytest.raises(ValueError, match=message) as caught:
        build(project, "buckets")
    assert "\n" not in str(caught.value)


def test_a_condition_without_the_table_checks_names_the_command(project):
    build(project, "images", "captions")
    edit(project, "[buckets]\n", '[buckets]\nwhere = "blur < 0.5"\n')
    with pytest.raises(ValueError, match="make checks"):
        build(project, "buckets")
