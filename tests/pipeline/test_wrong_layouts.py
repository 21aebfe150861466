"""Folders of other trainers that cannot be trained as they are: one line each, with what was found and what would be right."""

import pytest

from tests.pipeline.test_layouts import A, Files, project
from tests.projects import build

ONE = {f"a{A}": None}
CAT = {f"a/x{A}": None, "a/x.txt": "a cat"}
FOLDERS = '[[images.folder]]\npath = "images{}"\n\n[[images.folder]]\npath = "images/{}"\n'
WRONG: dict[str, tuple[Files, dict[str, str], str]] = {  # files, lines of project.toml by section, what is said
    "only reg": (
        {f"reg/1_cat/a{A}": None},
        {},
        r"images holds only regularisation images, in reg/1_cat/: add images of the subject, or set images\.layout",
    ),
    "only references": (
        {f"before/a{A}": None},
        {"": '[images]\nreferences = ["before"]\n'},
        r"images holds only reference images, in before/: add images of the subject, or set images\.layout",
    ),
    "no repeats": (
        {f"0_ohwx cat/a{A}": None},
        {},
        r"images: all images have 0 repeats, as in 0_ohwx cat: give one folder more, or set images\.layout",
    ),
    "archive": ({"photos.zip": "PK"}, {}, r"images holds no images, but 1 \.zip file, such as photos\.zip: unpack it first$"),
    "videos": (
        {"a.mp4": "x"},
        {},
        r"images holds no images, but 1 \.mp4 file, such as a\.mp4: videos are not read: save frames as PNG or JPEG$",
    ),
    "other names": (
        ONE | {"a_caption.txt": "a cat"},
        {},
        r"1 of 1 images have no caption .*; 1 text files have the name of no image: a_caption\.txt$",
    ),
    "spreadsheet": (
        ONE | {"captions.xlsx": "x"},
        {},
        r"1 of 1 images have no caption .*; captions\.xlsx is not read: files of captions are metadata\.jsonl, ",
    ),
    "other paths": (
        ONE | {"captions.json": '{"train/a.png": "a cat"}'},
        {},
        r"1 of 1 images have no caption .*; captions\.json: 1 row names an image that does not exist: train/a\.png;",
    ),
    "other column": (
        ONE | {"metadata.jsonl": f'{{"file_name": "a{A}", "text": "a cat"}}'},
        {"captions": 'caption_column = "txet"\n'},
        r"metadata\.jsonl, line 1: captions\.caption_column must name a column, got 'txet'; columns: .*text\?$",
    ),
    "semicolons": (
        ONE | {"captions.csv": f"image;caption\na{A};a cat\n"},
        {},
        r"captions\.csv, line 1: columns must be separated by commas, got semicolons: image;caption$",
    ),
    "no map": (
        ONE | {"captions.json": '"a cat"'},
        {},
        r"captions\.json: must be a map such as \{\"a\.png\": \"a cat\"\}, or a list such as .*, got a cat$",
    ),
    "placeholder": (
        ONE | {"a.txt": "[trigger] as a cat"},
        {},
        r"a\.txt: \[trigger\] stands for the trigger; set captions\.trigger, or write the word$",
    ),
    "twice": (
        CAT,
        {"": FOLDERS.format("", "a/..")},
        r"images\.folder: 'images' and 'images/a/\.\.' are the same folder; name it once$",
    ),
    "absent": (
        CAT,
        {"": FOLDERS.format("/a", "b")},
        r"images\.folder path must be a folder of images, got 'images/b': it does not exist$",
    ),
    "no folder of captions": (
        ONE,
        {"captions": 'folder = "words"\n'},
        r"captions\.folder must be a folder of caption files, got 'words'",
    ),
    "onetrainer": (
        {"../concepts.json": "[]"},
        {"": '[images]\nfolder = "concepts.json"\n'},
        r"concepts\.json is a file, not a folder|OneTrainer's concepts are read by",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_layout_is_one_line_that_says_what_was_found_and_what_would_be_right(name, tmp_path, tiny_weights):
    files, more, said = WRONG[name]
    folder = project(tmp_path / "project", tiny_weights, files, more)
    with pytest.raises(ValueError, match=said) as caught:
        build(folder, "images", "captions")
    assert "\n" not in str(caught.value)
