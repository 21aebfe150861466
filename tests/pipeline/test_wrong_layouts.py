"""Folders of other trainers that cannot be trained as they are: one line each, with what was found and what would be right."""

import json
from pathlib import Path

import pytest

from tests.pipeline.test_layouts import picture, project, write
from tests.projects import build


def only_reg(images: Path) -> dict[str, str]:
    picture(images / "reg/1_cat/a.png", 0)
    return {}


def only_references(images: Path) -> dict[str, str]:
    picture(images / "before/a.png", 0)
    return {"": '[images]\nreferences = ["before"]\n'}


def no_repeats(images: Path) -> dict[str, str]:
    picture(images / "0_ohwx cat/a.png", 0)
    return {}


def archive(images: Path) -> dict[str, str]:
    write(images / "photos.zip", "PK")
    return {}


def videos(images: Path) -> dict[str, str]:
    write(images / "a.mp4", "x")
    return {}


def other_names(images: Path) -> dict[str, str]:
    picture(images / "a.png", 0)
    write(images / "a_caption.txt", "a cat")
    return {}


def spreadsheet(images: Path) -> dict[str, str]:
    picture(images / "a.png", 0)
    write(images / "captions.xlsx", "x")
    return {}


def other_paths(images: Path) -> dict[str, str]:
    picture(images / "a.png", 0)
    write(images / "captions.json", json.dumps({"train/a.png": "a cat"}))
    return {}


def other_column(images: Path) -> dict[str, str]:
    name = picture(images / "a.png", 0).name
    write(images / "metadata.jsonl", json.dumps({"file_name": name, "text": "a cat"}))
    return {"captions": 'caption_column = "txet"\n'}


def semicolons(images: Path) -> dict[str, str]:
    name = picture(images / "a.png", 0).name
    write(images / "captions.csv", f"image;caption\n{name};a cat\n")
    return {}


def no_map(images: Path) -> dict[str, str]:
    picture(images / "a.png", 0)
    write(images / "captions.json", '"a cat"')
    return {}


def placeholder(images: Path) -> dict[str, str]:
    write(picture(images / "a.png", 0).with_suffix(".txt"), "[trigger] as a cat")
    return {}


def twice(images: Path) -> dict[str, str]:
    write(picture(images / "a/x.png", 0).with_suffix(".txt"), "a cat")
    return {"": '[[images.folder]]\npath = "images"\n\n[[images.folder]]\npath = "images/a/.."\n'}


def absent(images: Path) -> dict[str, str]:
    write(picture(images / "a/x.png", 0).with_suffix(".txt"), "a cat")
    return {"": '[[images.folder]]\npath = "images/a"\n\n[[images.folder]]\npath = "images/b"\n'}


def no_captions_folder(images: Path) -> dict[str, str]:
    picture(images / "a.png", 0)
    return {"captions": 'folder = "words"\n'}


def onetrainer(images: Path) -> dict[str, str]:
    write(images.parent / "concepts.json", "[]")
    return {"": '[images]\nfolder = "concepts.json"\n'}


WRONG = {
    only_reg: r"images holds only regularisation images, in reg/1_cat/: add images of the subject, or set images\.layout",
    only_references: r"images holds only reference images, in before/: add images of the subject, or set images\.layout",
    no_repeats: r"images: all images have 0 repeats, as in 0_ohwx cat: give one folder more, or set images\.layout",
    archive: r"images holds no images, but 1 \.zip file, such as photos\.zip: unpack it first$",
    videos: r"images holds no images, but 1 \.mp4 file, such as a\.mp4: videos are not read: save frames as PNG or JPEG$",
    other_names: r"1 of 1 images have no caption .*; 1 text files have the name of no image: a_caption\.txt$",
    spreadsheet: r"1 of 1 images have no caption .*; captions\.xlsx is not read: files of captions are metadata\.jsonl, ",
    other_paths: r"1 of 1 images have no caption .*; captions\.json: 1 row names an image that does not exist: train/a\.png;",
    other_column: r"metadata\.jsonl, line 1: captions\.caption_column must name a column, got 'txet'; columns: .*text\?$",
    semicolons: r"captions\.csv, line 1: columns must be separated by commas, got semicolons: image;caption$",
    no_map: r"captions\.json: must be a map such as \{\"a\.png\": \"a cat\"\}, or a list such as .*, got a cat$",
    placeholder: r"a\.txt: \[trigger\] stands for the trigger; set captions\.trigger, or write the word$",
    twice: r"images\.folder: 'images' and 'images/a/\.\.' are the same folder; name it once$",
    absent: r"images\.folder path must be a folder of images, got 'images/b': it does not exist$",
    no_captions_folder: r"captions\.folder must be a folder of caption files, got 'words'",
    onetrainer: r"concepts\.json is a file, not a folder|OneTrainer's concepts are read by",
}  # fmt: skip


@pytest.mark.parametrize("make", WRONG, ids=lambda make: make.__name__)
def test_a_wrong_layout_is_one_line_that_says_what_was_found_and_what_would_be_right(make, tmp_path, tiny_weights):
    folder = project(tmp_path / "project", tiny_weights, make(tmp_path / "project" / "images"))
    with pytest.raises(ValueError, match=WRONG[make]) as caught:
        build(folder, "images", "captions")
    assert "\n" not in str(caught.value)
