"""The stage images over real folders: which files become rows, what each row says, and what a second run reads."""

import dataclasses
import hashlib
import shutil

import numpy as np
import pytest

from stages.text_to_image.checks import mark_near_duplicates
from stages.text_to_image.images import folder
from stages.text_to_image.images import stage as images
from stages.text_to_image.images.folder import pair_references, scan
from stages.text_to_image.images.stage import STAGE
from stages.text_to_image.imaging.usable import names_copy
from tests.stages.text_to_image.images.folders import Project, draw


def test_a_usable_image_is_a_row_with_its_content_and_size(project):
    path = draw(project.source / "deep" / "er" / "é ü.png", size=(80, 72))
    row, about = project.run()["deep/er/é ü.png"], path.stat()
    expected = {"image_id": hashlib.sha256(path.read_bytes()).hexdigest(), "format": "PNG", "mode": "RGB", "frames": 1}
    expected |= {"bytes": about.st_size, "mtime_ns": about.st_mtime_ns, "inode": about.st_ino, "width": 80, "height": 72}
    expected |= {"rejected": None, "detail": "", "use": None, "reference_of": None}
    assert expected.items() <= row.items()


def test_every_file_that_cannot_be_used_is_a_row_with_its_reason_and_is_counted_in_the_summary(tmp_path):
    project = Project(tmp_path, max_pixels=10_000)
    good = draw(project.source / "good.png")
    draw(project.source / "icon.png", size=(63, 90))
    draw(project.source / "huge.png", size=(101, 100))
    (project.source / "cut.png").write_bytes(good.read_bytes()[:5000])
    (project.source / "letter.jpg").write_text("Dear Sir")
    (project.source / "nothing.webp").write_bytes(b"")
    (project.source / "film.mp4").write_bytes(b"\0\0\0\x20ftypisom")
    (project.source / "nosuffix").write_bytes(b"\1\2\3")
    shutil.copy(good, project.source / "good too.png")
    (project.source / "gone.png").symlink_to(project.source / "not here")
    project.run()
    assert project.verdicts() == {
        "cut.png": "truncated",
        "film.mp4": "unsupported",
        "gone.png": "unreadable",
        "good too.png": None,
        "good.png": "duplicate",
        "huge.png": "bomb",
        "icon.png": "too_small",
        "letter.jpg": "unreadable",
        "nosuffix": "unsupported",
        "nothing.webp": "unreadable",
    }
    assert project.lines[0] == "10 files: 1 usable, 1 bomb, 1 duplicate, 1 too_small, 1 truncated, 3 unreadable, 2 unsupported"
    assert project.lines[1].startswith("not used: cut.png (truncated), film.mp4 (unsupported), gone.png")
    details = {row["path"]: row["detail"] for row in project.stored.to_pylist()}
    assert details["good.png"] == "the same bytes as good too.png" and details["good too.png"] == ""
    assert "63 x 90" in details["icon.png"] and "images.min_side = 64" in details["icon.png"]
    assert all(details[path] for path, verdict in project.verdicts().items() if verdict)


def test_captions_licences_hidden_files_masks_and_the_film_of_a_live_photo_become_no_rows(project):
    for name in ("a.png", "a.mask.png", "masks/a.png", "masks/b.png", ".hidden.png", ".cache/b.png", "__MACOSX/c.png"):
        draw(project.source / name, seed=len(name))
    for name in ("a.MOV", "a.txt", "metadata.jsonl", "metadata.csv", "LICENSE", "readme.md", ".DS_Store", "Thumbs.db"):
        (project.source / name).write_text("x")
    assert sorted(project.run()) == ["a.png", "masks/b.png"]
    assert project.lines == ["2 files: 2 usable; 2 more are masks of other images"]


def test_only_new_and_changed_files_are_opened_and_an_unchanged_folder_yields_and_says_nothing(project, probed):
    for seed in range(3):
        draw(project.source / f"{seed}.png", seed)
    before = project.run()
    assert len(probed) == 3
    probed.clear()
    assert project.run() == {} and probed == []
    assert project.lines == []
    draw(project.source / "new.png", 9)
    draw(project.folder / "x.png", 7).replace(project.source / "1.png")
    after = project.run()
    assert set(after) == {"1.png", "new.png"} and len(probed) == 2
    assert after["1.png"]["image_id"] != before["1.png"]["image_id"]


def test_duplicates_follow_the_first_path_as_files_come_and_go(project, probed):
    first = draw(project.source / "m.png")
    shutil.copy(first, project.source / "z.png")
    project.run()
    assert project.verdicts() == {"m.png": None, "z.png": "duplicate"}
    shutil.copy(first, project.source / "a.png")
    probed.clear()
    assert set(project.run()) == {"a.png", "m.png", "z.png"} and len(probed) == 1  # marked again, not read again
    assert project.verdicts() == {"a.png": None, "m.png": "duplicate", "z.png": "duplicate"}
    assert {r["path"]: r["detail"] for r in project.stored.to_pylist()}["z.png"] == "the same bytes as a.png"
    (project.source / "a.png").unlink()
    probed.clear()
    assert set(project.run()) == {"m.png", "z.png"} and probed == []
    assert project.verdicts() == {"m.png": None, "z.png": "duplicate"}
    draw(project.source / "m.png", 5)
    project.run()
    assert project.verdicts() == {"m.png": None, "z.png": None}


def test_files_examined_one_by_one_and_finished_together_give_the_rows_of_one_run(project):
    draw(project.source / "m.png")
    for name in ("a.png", "z.png"):
        shutil.copy(project.source / "m.png", project.source / name)
    draw(project.source / "b.png", 1)
    (project.source / "broken.png").write_bytes(b"x")
    whole = project.context()
    for number in range(whole.output.pending.num_rows):
        unit = dataclasses.replace(whole, output=dataclasses.replace(whole.output, pending=whole.output.pending.slice(number, 1)))
        project.store(row for batch in STAGE.run(unit) for row in batch.to_pylist())
    assert project.verdicts() == {"a.png": None, "b.png": None, "broken.png": "unreadable", "m.png": None, "z.png": None}
    finished = dataclasses.replace(whole, output=dataclasses.replace(whole.output, stored=project.stored))
    project.store(row for batch in STAGE.finish(finished) for row in batch.to_pylist())
    by_units, project.stored = project.stored, None
    project.run()
    assert project.stored.equals(by_units)
    assert project.verdicts()["m.png"] == project.verdicts()["z.png"] == "duplicate"


@pytest.mark.parametrize(
    ("copy", "original"),
    [
        ("IMG_0413 Kopie.HEIC", "IMG_0413.HEIC"),
        ("IMG_0413 copy 2.png", "IMG_0413.png"),
        ("IMG (1).png", "IMG.png"),
        ("IMG - Copy (2).png", "a/IMG.png"),
        ("Copy of cat.png", "cat.png"),
    ],
)
def test_of_equal_files_that_without_the_name_of_a_copy_is_used(copy, original):
    assert copy < original
    rows = [{"path": path, "image_id": "A", "use": None, "rejected": None, "detail": ""} for path in (copy, original)]
    assert [row["rejected"] for row in images.mark_duplicates(rows)] == ["duplicate", None]
    thumbnail = np.zeros((32, 32), np.uint8)
    thumbnail[:16] = 200
    rows = [{"path": path, "image_id": path, "short_side": 64, "thumbnail": thumbnail.tobytes()} for path in (copy, original)]
    assert [row["duplicate_of"] for row in mark_near_duplicates(rows, 0.94)] == [original, None]
    assert not any(map(names_copy, ("photocopy.png", "cat-2.png", "copy.png", "(1).png")))


def test_a_run_that_was_stopped_marks_no_duplicates_and_has_no_summary(tmp_path, probed):
    project = Project(tmp_path, workers=1)
    for number in range(20):
        draw(project.source / f"{number:02}.png")
    project.run(stop=lambda: any(name.endswith("02.png") for name in probed))
    assert set(project.verdicts().values()) == {None} and project.lines == []
    assert sorted(project.verdicts())[:3] == ["00.png", "01.png", "02.png"] and len(project.verdicts()) < 6
    project.run()
    assert project.verdicts() == {"00.png": None} | {f"{number:02}.png": "duplicate" for number in range(1, 20)}


def test_a_missing_or_empty_folder_is_an_error_that_names_the_remedy(project):
    with pytest.raises(ValueError, match=r"images holds no images: put some there, or set images.folder$"):
        project.context()
    (project.source / "a.txt").write_text("only a caption")
    with pytest.raises(ValueError, match="holds no images"):
        project.context()
    for name in ("a.zip", "b.zip"):
        (project.source / name).write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"but 2 \.zip files, such as a\.zip: unpack them first$"):
        project.context()
    project.source = project.folder / "image"
    with pytest.raises(ValueError, match=r'does not exist: .* set images.folder; did you mean "images"\?'):
        project.context()
    project.source = draw(project.folder / "a.png")
    with pytest.raises(ValueError, match="is a file, not a folder"):
        project.context()


def test_the_output_of_a_project_that_lies_in_its_own_image_folder_becomes_no_rows(tmp_path):
    for name in ("a.png", "sub/b.png", "tables/samples/1/grid.png", "weights/x.png", "sub/tables/c.png", "exports/d.png"):
        draw(tmp_path / name)
    (tmp_path / "project.toml").write_text("")
    assert [row["path"] for row in scan(tmp_path).files] == ["a.png", "sub/b.png", "sub/tables/c.png"]


def test_equal_images_with_references_of_their_own_count_as_one_image():
    def row(path: str, image_id: str, of: str | None = None, rejected: str | None = None) -> dict:
        about = {"folder": "control", "use": "reference", "reference_of": of} if path.startswith("control") else folder.NOTHING
        return {"path": path, "image_id": image_id, "rejected": rejected, "offset": None} | folder.NOTHING | about

    rows = [row("a.png", "A"), row("b.png", "A", rejected="duplicate"), row("c.png", "C"), row("d.png", "D", rejected="damaged")]
    rows += [row(f"control/{name}.png", name.upper() * 2, of=f"{name}.png") for name in "abd"]
    assert list(folder.describe(rows)) == ["paired images: 2 references in control/ for 1 of 2 images"]


@pytest.mark.parametrize(
    ("paths", "folders", "pairs"),
    [
        (["cat.png", "control/cat.jpg"], None, {"control/cat.jpg": ("cat.png", 1)}),
        (["a/cat.png", "a/control/cat.png"], None, {"a/control/cat.png": ("a/cat.png", 1)}),
        (["main/cat.png", "control_1/cat.png"], None, {"control_1/cat.png": ("main/cat.png", 1)}),
        (["main/a/cat.png", "control/a/cat.png"], None, {"control/a/cat.png": ("main/a/cat.png", 1)}),
        (["cat_in.png", "cat_out.webp"], None, {"cat_in.png": ("cat_out.webp", 1)}),
        (["x/1_start.png", "x/1_end.png"], None, {"x/1_start.png": ("x/1_end.png", 1)}),
        (["cat_in.png", "dog_out.png"], None, {}),
        (["cat.png", "control/dog.png"], None, {}),  # a folder of the subject that is only called so
        (["a.png", "control/a.png", "control/b.png"], None, {"control/a.png": ("a.png", 1), "control/b.png": (None, 1)}),
        (["a.png", "y/a.png", "in/x/a.png"], ("y", "in/x"), {"y/a.png": ("a.png", 1), "in/x/a.png": ("a.png", 2)}),
        (["cat.png", "control/cat.png"], (), {}),
        (["cafe\u0301.png", "control/caf\u00e9.png"], None, {"control/caf\u00e9.png": ("cafe\u0301.png", 1)}),
    ],
)
def test_a_reference_has_the_name_of_its_image(paths, folders, pairs):
    assert pair_references(paths, folders) == pairs
    assert pair_references(reversed(paths), folders) == pairs
