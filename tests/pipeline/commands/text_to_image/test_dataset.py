"""`latentmill captions`, `lint` and `crops`."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import shutil

import numpy as np
import pillow_heif
import pytest
from PIL import Image
from starlette.testclient import TestClient

from pipeline.commands.query import answer
from pipeline.commands.text_to_image.dataset import write_crops
from pipeline.page.app import make_app
from pipeline.page.command import write_report
from pipeline.page.site import Site
from pipeline.project.project import Project
from stages.hashing import text_sha256
from stages.run import Problems
from stages.text_to_image.captions.edits import write_edits
from stages.text_to_image.captions.stage import read_edits
from stages.text_to_image.checks import measure
from stages.text_to_image.latents import ImageJob, decode_crops
from stages.text_to_image.sheets import QUESTION, draw_crop
from tests import projects
from tests.projects import draw, latentmill, make


@pytest.fixture(scope="module")
def project(tmp_path_factory, tiny_weights):
    folder = make(tmp_path_factory.mktemp("captions") / "project", tiny_weights, images=2)
    latentmill(folder, "run", "images", "--only")
    return folder


def texts(folder):
    rows = Project(folder).current("captions").rows().to_pylist()
    return {row["text"]: row["source"] for row in rows if row["role"] == "caption"}


def edit(folder, edits, position=0):
    """Store edits: image path -> new text, None to take it back."""
    ids = {row["path"]: row["image_id"] for row in Project(folder).current("images").rows().to_pylist()}
    write_edits(folder, {f"{ids[path]}:{position}": text for path, text in edits.items()})


def test_captions_go_into_a_file_and_the_edited_file_comes_back_and_the_image_folder_is_not_written(project, tmp_path):
    file, before = tmp_path / "out.csv", sorted((path, path.stat().st_mtime_ns) for path in (project / "images").iterdir())
    assert f"wrote 2 captions to {file}" in latentmill(project, "captions", "--edit", str(file))
    assert "exists already" in latentmill(project, "captions", "--edit", str(file), code=2)
    rows = list(csv.DictReader(file.open(encoding="utf-8", newline="")))
    assert [row["text"] for row in rows] == ["picture number 0", "picture number 1"]
    rows[0]["text"] = 'a "quoted", new\ntext'
    with file.open("w", encoding="utf-8-sig", newline="") as opened:  # as a spreadsheet writes it
        writer = csv.DictWriter(opened, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    assert "1 caption changed" in latentmill(project, "captions", "--apply", str(file))
    assert texts(project) == {'a "quoted", new\ntext': "edit", "picture number 1": "sidecar"}
    assert "0 captions changed" in latentmill(project, "captions", "--apply", str(file))
    assert before == sorted((path, path.stat().st_mtime_ns) for path in (project / "images").iterdir())


def test_a_file_that_fits_no_caption_is_one_line_and_changes_nothing(project, tmp_path):
    latentmill(project, "captions")
    before, file = texts(project), tmp_path / "wrong.csv"
    for text, message in (
        ("path,text\na,b\n", "must have the columns image_id, position and text, got path, text"),
        ("image_id,position,text\nabc,0,x\n", "line 2: names no caption of this project"),
        ('image_id,position,text\nabc,0,"x\n', "not valid CSV"),
    ):
        file.write_text(text)
        assert message in latentmill(project, "captions", "--apply", str(file), code=2)
    assert texts(project) == before


def test_lint_names_every_mistake_at_once_a_run_stops_at_all_of_them_and_crops_needs_no_captions(tmp_path, tiny_weights):
    folder = make(tmp_path / "project", tiny_weights, images=5)
    images = folder / "images"
    (images / "picture0.txt").write_bytes("schön".encode("latin-1"))
    (images / "picture1.txt").write_bytes(b"\xff\xfea")
    (images / "picture2.txt").unlink()
    (images / "picture3.txt").write_text(" ")
    (images / "captions.json").write_text("{")
    (images / "broken.png").write_bytes(b"\x89PNG")
    shutil.copy(images / "picture4.png", images / "zcopy.png")
    printed = latentmill(folder, "lint", code=2)
    assert f"{images / 'captions.json'}: not valid JSON" in printed
    assert f"picture0.png: {images / 'picture0.txt'} is not UTF-8: byte 3 is 0xf6; save it as UTF-8" in printed
    assert (
        f'(as Latin-1 it reads "schön"; if so: iconv -f latin1 -t utf-8 {images / "picture0.txt"}' in printed
        and "picture1.txt is not UTF-16" in printed
    )
    assert "broken.png: not used: " in printed and "zcopy.png: not used: " in printed
    assert "picture4.png: blurred, small: " in printed
    assert "3 errors, 2 files not used, 5 images with warnings" in printed
    (images / "captions.json").unlink()
    printed = latentmill(folder, "lint", code=2)  # before, captions.json might have had their captions
    assert "picture2.png: no caption: write picture2.txt beside it, or" in printed
    assert "picture3.png: no caption: picture3.txt is there, but empty, or" in printed
    stopped = [
        line for line in latentmill(folder, "run", "captions", "--only", code=2).splitlines() if line.startswith("error: ")
    ]
    assert [("UTF-8" in line, "UTF-16" in line, "2 of 5 images have no" in line) for line in stopped] == [
        (True, False, False), (True, True, False), (False, False, True)
    ]  # fmt: skip
    assert "picture0.txt" in str(Problems(stopped)) and "; and 2 more: latentmill lint lists them" in str(Problems(stopped))
    assert "wrote " in latentmill(folder, "crops")
    for number in range(30):
        draw(images / f"more{number}.png", 20 + number, (64, 64))
        (images / f"more{number}.txt").write_bytes(b"\xe9")
    latentmill(folder, "run", "images", "--only")
    *_, last = latentmill(folder, "run", "captions", "--only", code=2).splitlines()
    assert last == "error: and 13 more"


def page_of(folder, name, **params):
    client = TestClient(make_app(Site(folder), "secret"), base_url="http://127.0.0.1:8765")
    return client.get(f"/fragment/{name}", params=params).text


def test_lint_names_what_a_trigger_hides_and_files_that_say_different_things(tmp_path, tiny_weights):
    folder = make(tmp_path / "project", tiny_weights, images=5)
    images = folder / "images"
    projects.edit(folder, "[captions]", '[captions]\ntrigger = "ohwx"\nmissing = "trigger"\ntemplate = "{trigger}, {caption}"')
    (images / "picture0.txt").unlink()
    (images / "picture1.txt").write_text(" ")
    (images / "picture2.txt").write_text("ohwx")
    lines = [{"file_name": f"{name}.png", "text": text} for name, text in (("picture3", "another"), ("gone", "x"))]
    lines.append({"file_name": "picture4.png", "text": "picture  number 4"})
    (images / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    latentmill(folder, "run", "images", "--only")
    printed = latentmill(folder, "lint")
    assert "metadata.jsonl: 1 row names an image that does not exist: gone.png" in printed
    for path, said in (
        ("picture0", "no caption: the trigger alone is trained"),
        ("picture1", "picture1.txt is empty: the trigger alone is trained"),
        ("picture2", "picture2.txt has the trigger alone"),
        ("picture3", "picture3.txt and metadata.jsonl:1 differ: picture3.txt is trained (captions.sources)"),
    ):
        assert [said in line for line in printed.splitlines() if line.startswith(f"{path}.png: ")] == [True]
    assert "metadata.jsonl:3" not in printed
    assert "0 errors, 0 files not used, 5 images with warnings, 3 of them without a caption\n" in printed
    shown = page_of(folder, "images", filter="without caption")
    assert [f"picture{number}.png" in shown for number in range(5)] == [True] * 3 + [False] * 2


def test_lint_sums_up_what_it_says_of_many_pictures_and_json_names_them_all(tmp_path, tiny_weights):
    folder = make(tmp_path / "project", tiny_weights, images=5)
    for number in range(5):
        Image.new("RGB", (300, 300), (50 * number, 99, 0)).save(folder / "images" / f"picture{number}.png")
    projects.edit(folder, "[captions]", '[captions]\ntrigger = "ohwx"\nmissing = "trigger"\ntemplate = "{trigger}, {caption}"')
    for path in (folder / "images").glob("*.txt"):
        path.unlink()
    printed = latentmill(folder, "lint")
    said = "picture0.png, picture1.png, picture2.png and 2 more: no_caption: no caption: the trigger alone is trained"
    assert [line for line in printed.splitlines() if "no_caption" in line] == [said]
    printed = latentmill(folder, "lint", "--format", "json")
    assert len(json.loads(printed[printed.index("[") : printed.rindex("]") + 1])) == 5
    edit(folder, {"picture0.png": "ohwx, a plain picture"})  # an edit is a caption
    assert "4 images with warnings, 4 of them without a caption" in latentmill(folder, "lint")
    (folder / "images" / "picture1.txt").write_text("a red thing " * 300)  # named before it is encoded
    assert re.search(r"picture1\.png: .*\d tokens too long for the text encoder, which reads \d", latentmill(folder, "lint"))


def test_a_caption_file_that_changes_after_its_edit_is_named_each_time_and_either_can_be_taken(tmp_path, tiny_weights):
    folder = make(tmp_path / "project", tiny_weights, images=2)
    latentmill(folder, "captions")
    edit(folder, {f"picture{number}.png": f"edited {number}" for number in range(2)})
    assert "changed after" not in latentmill(folder, "captions") + latentmill(folder, "lint")
    (folder / "images" / "picture0.txt").write_text("newer")
    said = "picture0.png: picture0.txt has changed since this edit"
    assert page_of(folder, "captions").count(said) == 1  # before a stage has read it
    told = "1 caption file changed after the caption was edited on the page (picture0.txt): the edit is trained; `latentmill capt"
    for _ in range(2):
        assert told in " ".join(latentmill(folder, "captions").split())
    assert "picture0.txt has changed since the caption was edited on the page: the edit is trained" in latentmill(folder, "lint")
    assert page_of(folder, "captions").count(said) == 1
    assert texts(folder) == {"edited 0": "edit", "edited 1": "edit"}
    assert "1 edit dropped: what is written in picture0.txt counts again" in latentmill(folder, "captions", "--take-files")
    assert texts(folder) == {"newer": "sidecar", "edited 1": "edit"}
    assert "no caption file has changed since" in latentmill(folder, "captions", "--take-files", code=2)
    latentmill(folder, "captions", "--sidecars")
    assert texts(folder) == {"newer": "sidecar", "edited 1": "sidecar"}
    assert "changed after" not in latentmill(folder, "captions", "--undo-sidecars")
    assert texts(folder) == {"newer": "sidecar", "edited 1": "edit"}


def test_the_page_edits_the_text_that_a_caption_file_has_now_though_no_stage_has_read_it(tmp_path, tiny_weights):
    folder = make(tmp_path / "project", tiny_weights, images=1)
    latentmill(folder, "captions")
    (row,) = answer(Project(folder), "select image_id, position, text from captions where role = 'caption'").to_pylist()
    key, before = f"{row['image_id']}:{row['position']}", row["text"]
    (folder / "images" / "picture0.txt").write_text("by my editor")
    assert "by my editor" in page_of(folder, "captions")
    site = Site(folder)
    assert site.edit("captions", {key: {"before": before, "text": f"{before}, mended"}}) == {key: "by my editor"}
    assert not read_edits(folder)
    assert site.edit("captions", {key: {"before": "by my editor", "text": "by my editor, mended"}}) == {}
    assert read_edits(folder) == {key: "by my editor, mended"}


def soft(side: int = 160) -> Image.Image:
    """A red disc whose edge fades out, on nothing; black lies below the transparent pixels, as drawing programs leave it."""
    away = np.hypot(*(np.mgrid[:side, :side] - (side - 1) / 2)) / side
    pixels = np.zeros((side, side, 4), np.uint8)
    pixels[away < 0.45, 0] = 255
    pixels[..., 3] = np.rint(255 * np.clip((0.4 - away) * 5, 0, 1))
    return Image.fromarray(pixels)


def test_page_report_and_sheets_of_crops_show_transparent_pictures_on_the_colour_that_is_trained(tmp_path, tiny_weights):
    folder = make(tmp_path / "project", tiny_weights, images=1)
    pictures = {"a.png": soft(), "b.png": soft().convert("LA"), "c.png": soft().quantize(64), "d.webp": soft()}
    for name, picture in pictures.items():
        picture.save(folder / "images" / name, lossless=True)
        assert Image.open(folder / "images" / name).has_transparency_data
    pillow_heif.register_heif_opener()
    soft().save(folder / "images" / "e.heic", quality=-1)
    projects.edit(folder, "[train]", '[latents]\nbackground = "#0080ff"\n\n[train]')
    projects.build(folder, "images", "buckets")
    project, site = Project(folder), Site(folder)
    page = TestClient(make_app(site), base_url="http://127.0.0.1")
    crops = {row["path"]: row for row in answer(project, QUESTION).to_pylist()}
    assert {*pictures, "e.heic"} < crops.keys()
    for name in (*pictures, "e.heic"):
        row, path = crops[name], folder / "images" / name
        trained = Image.fromarray(
            decode_crops(ImageJob(row["image_id"], path, [row | {"mask_id": "", "flip": False}], None), "#0080ff")[0][0]
        )
        assert np.abs(np.asarray(trained)[0, 0].astype(int) - (0, 128, 255)).max() <= 2
        address = f"/picture/image_folder/{name}"
        shown = [Image.open(io.BytesIO(page.get(address, params={"size": size}).content)) for size in ("160", "384", "file")]
        shown.append(draw_crop(path, row, project.config.sections["latents"].background))
        for each in shown:
            differ = np.asarray(each.convert("RGB").resize((32, 32)), int) - np.asarray(trained.resize((32, 32)), int)
            assert np.abs(differ).mean() < 4, name
        grey = np.frombuffer(measure(path, project.config.sections["checks"].background)["thumbnail"], np.uint8).reshape(32, 32)
        assert np.abs(grey - np.asarray(trained.convert("L").resize((32, 32)), int)).mean() < 4, name
    report = write_report(site, tmp_path / "report.html").read_text(encoding="utf-8")
    assert base64.b64encode(site.picture("image_folder/a.png", 256)).decode() in report
    sheet = np.asarray(Image.open(write_crops(project)[0]))
    assert (np.abs(sheet.astype(int) - (0, 128, 255)).max(axis=-1) <= 2).sum() > 5 * 4000
    with pytest.raises(ValueError, match="must be a new folder, but it has files"):
        write_crops(project, tmp_path)


@pytest.fixture
def mixed(tmp_path, tiny_weights):
    """A project with a template, whose captions lie in a sidecar, in a folder of captions, in metadata, and in a file name."""
    folder = make(tmp_path / "project", tiny_weights, images=3)
    projects.edit(
        folder, "[captions]", '[captions]\ntrigger = "ohwx"\ntemplate = "{trigger}, {caption}, film"\nmissing = "filename"'
    )
    images = folder / "images"
    (images / "picture1.txt").rename((images / "captions").mkdir() or images / "captions" / "picture1.txt")
    (images / "picture2.txt").unlink()
    (images / "picture2.png").rename(images / "fox.png")
    draw(images / "fox.webp", 9, (128, 96))
    (images / "metadata.jsonl").write_text('{"file_name": "fox.png", "text": "a fox"}\n')
    projects.build(folder, "images", "captions")
    return folder


def test_edited_captions_are_written_into_the_files_that_the_stage_reads_and_undo_brings_every_byte_back(mixed):
    images = mixed / "images"
    before = {path: path.read_bytes() for path in images.rglob("*") if path.is_file()}
    edit(mixed, {"picture0.png": "ohwx, one, film", "picture1.png": "ohwx two\u2028more, film", "fox.png": "ohwx, three, film"})
    said = latentmill(mixed, "captions", "--sidecars")
    assert "3 captions written into 3 files\n" in said
    assert (images / "picture0.txt").read_text() == "one\n"
    assert (images / "captions" / "picture1.txt").read_text() == "ohwx two\u2028more\n"
    assert (images / "fox.png.txt").read_text() == "three\n"  # fox.txt would be the caption of fox.webp too
    expected = {
        "ohwx, one, film": "sidecar",
        "ohwx two\u2028more, film": "sidecar",
        "ohwx, three, film": "sidecar",
        "ohwx, fox, film": "filename",
    }
    assert texts(mixed) == expected
    assert "there is nothing to write" in latentmill(mixed, "captions", "--sidecars", code=2)
    (images / "picture0.txt").write_text("by hand\n")
    said = latentmill(mixed, "captions", "--undo-sidecars")
    assert "2 files restored to the old content" in said and "changed since and left as they are: picture0.txt" in said
    after = {path: path.read_bytes() for path in images.rglob("*") if path.is_file()}
    assert after == before | {images / "picture0.txt": b"by hand\n"}
    assert texts(mixed)["ohwx, three, film"] == texts(mixed)["ohwx two\u2028more, film"] == "edit"
    assert "there is nothing to undo" in latentmill(mixed, "captions", "--undo-sidecars", code=2)


def test_a_caption_that_a_file_cannot_give_stays_an_edit_and_nothing_is_written_if_one_file_cannot_be(mixed):
    projects.edit(mixed, "[captions]", '[captions]\nsources = ["metadata", "sidecar"]')
    edit(
        mixed,
        {"picture0.png": "without the words of the template", "fox.png": "ohwx, three, film", "picture1.png": "ohwx, a, film"},
    )
    said = latentmill(mixed, "captions", "--sidecars")
    assert "1 caption written into 1 file; 2 stay edits of the project" in said and "picture0.png, fox.png" in said
    assert not (mixed / "images" / "fox.png.txt").exists()
    assert texts(mixed)["without the words of the template"] == texts(mixed)["ohwx, three, film"] == "edit"
    (mixed / "images" / "fox.png.txt").mkdir()
    edit(mixed, {"picture0.png": "ohwx, one, film"})
    assert "fox.png.txt: is a directory" in latentmill(mixed, "captions", "--sidecars", code=2)
    assert (mixed / "images" / "picture0.txt").read_text() == "picture number 0"
    assert list((mixed / "images").glob(".tmp-*")) == []
    projects.build(mixed, "captions")
    assert texts(mixed)["ohwx, one, film"] == "edit"


def test_a_file_that_two_images_share_is_not_written_for_one_of_them_and_one_line_of_many_is(mixed):
    projects.edit(mixed, "[captions]", '[captions]\nsources = ["sidecar"]')
    (mixed / "images" / "fox.txt").write_text("a fox\n")
    projects.build(mixed, "captions")
    edit(mixed, {"fox.png": "ohwx, one fox, film", "picture0.png": "ohwx, one, film"})
    said = latentmill(mixed, "captions", "--sidecars")
    assert "1 caption written into 1 file; 1 stay edits of the project" in said and "fox.png" in said
    assert (mixed / "images" / "fox.txt").read_text() == "a fox\n"
    assert {"ohwx, a fox, film", "ohwx, one fox, film", "ohwx, one, film"} <= texts(mixed).keys()
    projects.edit(mixed, "[captions]", '[captions]\nlines = "many"')
    (mixed / "images" / "picture0.txt").write_text("first\n\nsecond\n")
    projects.build(mixed, "captions")
    edit(mixed, {"picture0.png": "ohwx, other, film"}, position=1)
    latentmill(mixed, "captions", "--sidecars")
    assert (mixed / "images" / "picture0.txt").read_text() == "first\n\nother\n"


def test_undo_keeps_a_newer_edit_and_writing_follows_no_link_out_of_the_folder(mixed, tmp_path):
    projects.edit(mixed, "[captions]", '[captions]\nsources = ["metadata", "sidecar"]')
    (tmp_path / "letter").write_text("not a caption")
    (mixed / "images" / "fox.png.txt").symlink_to(tmp_path / "letter")
    edit(mixed, {"fox.png": "ohwx, three, film", "picture0.png": "ohwx, one, film"})
    latentmill(mixed, "captions", "--sidecars")
    (line,) = (mixed / "captions.written.jsonl").read_text().splitlines()
    assert json.loads(line)["file"] == "picture0.txt"
    edit(mixed, {"picture0.png": "ohwx, newer, film"})
    latentmill(mixed, "captions", "--undo-sidecars")
    assert texts(mixed)["ohwx, newer, film"] == "edit" and "ohwx, one, film" not in texts(mixed)


def test_undo_writes_no_file_that_is_no_caption_of_the_project_and_a_record_of_another_program_is_one_line(mixed):
    odd = {"batch": 0, "file": "a.txt", "after": "", "edits": {"a:0": 3}}
    bare = {"batch": 0, "file": "a.txt", "after": "", "edits": {}}
    for line in ("[" * 60_000, "7", "{}", '{"undone": []}', json.dumps(odd | {"before": None}), json.dumps(bare)):
        (mixed / "captions.written.jsonl").write_text(line + "\n")
        assert "captions.written.jsonl:1: not" in latentmill(mixed, "captions", "--undo-sidecars", code=2)
    for name in ("../../notes.txt", "notes.md", "../letters/a.txt"):
        target = mixed / "images" / name
        target.parent.mkdir(exist_ok=True)
        target.write_text("mine")
        line = {"batch": 0, "file": name, "before": "eA==", "after": text_sha256("mine"), "edits": {}}
        (mixed / "captions.written.jsonl").write_text(json.dumps(line) + "\n")
        assert f"names {name}, which is no caption file" in latentmill(mixed, "captions", "--undo-sidecars", code=2)
        assert target.read_text() == "mine"
