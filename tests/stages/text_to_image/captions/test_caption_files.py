"""Files of captions: sidecars, metadata, CSV and JSON, which texts are read from them, and what is an error."""

import hashlib
import itertools
import json
import os
import sys
import tarfile

import pytest

from stages.text_to_image.caption_files import read_metadata


def test_a_sidecar_is_the_caption_and_the_row_says_where_it_came_from(captioned):
    rows = {row["image_id"]: row for row in captioned.rows() if row["role"] == "caption"}
    about = {"caption_id": hashlib.sha256(b"a dog").hexdigest(), "text": "a dog", "source": "sidecar", "origin": "sub/b.txt"}
    assert about.items() <= rows["sub/b.jpg"].items()


def test_a_sidecar_may_be_named_after_the_whole_file_name_and_have_another_extension(folder):
    folder.write("a.png.txt", "whole name")
    folder.write("a.txt", "stem")
    folder.write("sub/b.txt", "stem")
    assert folder.captions() == {"a.png": ["whole name"], "sub/b.jpg": ["stem"]}
    folder.write("a.caption", "other")
    folder.write("sub/b.jpg.caption", "other")
    assert folder.captions(extension=".caption") == {"a.png": ["other"], "sub/b.jpg": ["other"]}


def test_lines_of_a_sidecar_are_one_caption_or_many_as_the_setting_says(folder):
    folder.write("a.txt", "\r\n one \r\n\r\ntwo\r\none")
    folder.write("sub/b.txt", "single")
    assert folder.captions()["a.png"] == ["one \n\ntwo\none"]
    assert folder.captions(lines="many")["a.png"] == ["one", "two"]
    rows = [row for row in folder.rows(lines="many") if row["image_id"] == "a.png"]
    assert [(row["position"], row["origin"]) for row in rows] == [(0, "a.txt:2"), (1, "a.txt:4")]


def test_unicode_is_kept_as_it_was_written(folder):
    text = "café cafe\u0301 日本 🦊 “zwj” 👩\u200d🚀 ﬁ"
    folder.write("a.txt", text)
    folder.write("sub/b.txt", "\ufeff" + text)
    assert folder.captions() == {"a.png": [text], "sub/b.jpg": [text]}
    for encoding in ("utf-16", "utf-8-sig"):
        folder.write("a.txt", text, encoding)
        assert folder.captions()["a.png"] == [text]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("caf\u00e9".encode("latin-1"), r"a\.txt is not UTF-8: byte 3 is 0xe9; save it as UTF-8 .*if so: iconv -f latin1"),
        (b"\xef\xbb\xbfab\xff", r"a\.txt is not UTF-8: byte 5 is 0xff"),
        ("cat".encode("utf-16-le"), r"a\.txt has a zero at byte 1, as UTF-16 without a byte order mark does"),
        (b"\xff\xfec\x00\x00\xd8", r"a\.txt is not UTF-16: byte"),
        ("ca\0t".encode("utf-16"), r"a\.txt has a zero as character 3; remove it"),
    ],
)
def test_a_text_in_another_encoding_is_an_error_that_names_file_and_byte(captioned, data, message):
    captioned.write("a.txt", data)
    with pytest.raises(ValueError, match=message):
        captioned.rows()


def test_metadata_jsonl_and_csv_name_files_relative_to_themselves(folder):
    lines = [{"file_name": "a.png", "text": "root"}, {"file_name": "sub/b.jpg", "text": "from above"}]
    folder.write("metadata.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n")
    folder.write("sub/metadata.csv", 'file_name,caption,x\nb.jpg,"with, comma\nand ""line""",1\n')
    assert folder.captions() == {"a.png": ["root"], "sub/b.jpg": ["from above", 'with, comma\nand "line"']}
    origins = {row["text"]: (row["source"], row["origin"]) for row in folder.rows()}
    assert origins["from above"] == ("metadata", "metadata.jsonl:2")
    assert origins['with, comma\nand "line"'] == ("metadata", "sub/metadata.csv:3")


def test_metadata_rows_without_an_image_are_reported_and_are_no_error(captioned):
    rows = [{"file_name": name, "text": "x"} for name in ("a.png", "gone.png", "b.jpg", "c.png", "d.png")]
    captioned.write("metadata.jsonl", "\n".join(map(json.dumps, rows)))
    captioned.rows()
    assert captioned.lines == ["metadata.jsonl: 4 rows name images that do not exist: gone.png, b.jpg, c.png and 1 more"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metadata.jsonl", '{"file_name": "a.png", "text": "x"}\n{"file_name": ', r"line 2: not valid JSON at column 15"),
        ("metadata.jsonl", "[1]", r"line 1: must be a JSON object such as .*, got \[1\]"),
        ("metadata.jsonl", '{"image": "a.png", "text": "x"}', r"line 1: file_name must be a path; columns: image, text"),
        ("metadata.jsonl", '{"file_name": "a.png", "label": 3}', r"line 1: must have one of text, caption, prompt; columns: .*"),
        ("metadata.jsonl", '{"file_name": "a.png", "text": 3}', r"line 1: text must be a text or a list of texts, got 3"),
        ("metadata.csv", "file_name;text\na.png;x\n", r"line 1: columns must be separated by commas, got semicolons"),
        ("metadata.jsonl", '{"file_name": "a.png", "text": "\\ud83d"}', r":1: .*half of a surrogate pair"),
        ("metadata.jsonl", "[" * 100_000, "line 1: .*nested too deeply"),
        ("metadata.jsonl", '{"file_name": "a.png", "text": ' + "9" * 5000 + "}", "line 1: .*not valid JSON"),
        ("metadata.jsonl", '{"file_name": "a.png", "text": "x", "text": "y"}', "line 1: .*the key 'text' is there twice"),
        ("metadata.csv", "file_name,text\np0.png,a red, round thing\n", r"line 2: must have 2 .*, got 3; .* in double quotes"),
        ("metadata.csv", "file_name,text\np0.png\n", r"line 2: must have 2 fields .*, got 1"),
        ("metadata.csv", 'file_name,text\na.png,"a red\np1.png,x\n', r"line 2: not valid CSV: unexpected end of data"),
        ("metadata.csv", 'file_name,text\na.png,"a red\np1.png,"blue"\n', r"line 2: not valid CSV"),
        ("metadata.csv", "file_name,text\na.png,x\nfile_name,text\nb.png,y\n", r"line 3: the names .* a second"),
        ("metadata.csv", "file_name,text,text\na.png,x,y\n", r"line 1: the column text is there twice"),
        ("metadata.csv", "file_name,text\na.png," + "x" * 200_000, r"line 2: not valid CSV: field larger than field limit"),
    ],
)  # fmt: skip
def test_a_malformed_ambiguous_or_hostile_metadata_file_is_an_error_with_its_line(captioned, name, text, message):
    captioned.write(name, text)
    with pytest.raises(ValueError, match=f"{name}.*{message}"):
        captioned.rows(sources=("metadata", "sidecar"))


def test_a_quoted_csv_text_is_taken_whole_also_after_a_space(folder):
    folder.write("metadata.csv", 'file_name, text\n\na.png, "a red, round thing"\nsub/b.jpg,a 5" nail\n')
    assert folder.captions() == {"a.png": ["a red, round thing"], "sub/b.jpg": ['a 5" nail']}


@pytest.mark.parametrize("name", ["a.txt", "metadata.jsonl", "metadata.csv"])
def test_a_link_to_a_text_in_its_own_folder_is_read_and_one_to_a_text_elsewhere_is_refused(captioned, tmp_path, name):
    (captioned.root / "a.txt").rename(captioned.root / "all.txt")
    (captioned.root / "a.txt").symlink_to("all.txt")
    assert captioned.captions()["a.png"] == ["a cat"]
    (tmp_path / "secret").write_text("file_name,text\na.png,secret")
    for target in (tmp_path / "secret", "/proc/self/environ"):
        (captioned.root / name).unlink(missing_ok=True)
        (captioned.root / name).symlink_to(target)
        with pytest.raises(ValueError, match=rf"{name} is a link to .*, in another folder: captions are not read from there"):
            captioned.rows()


def test_a_named_pipe_or_a_huge_file_as_a_sidecar_is_refused_and_not_waited_for(captioned):
    (captioned.root / "a.txt").unlink()
    os.mkfifo(captioned.root / "a.txt")
    with pytest.raises(ValueError, match=r"a\.txt is not a regular file"):
        captioned.rows()
    (captioned.root / "a.txt").unlink()
    with (captioned.root / "a.txt").open("wb") as file:
        file.truncate(40_000_000_000)
    with pytest.raises(ValueError, match=r"a\.txt is too large: 40,000,000,000 bytes, at most 1,000,000 are read"):
        captioned.rows()


def test_a_name_in_another_unicode_spelling_is_found_unless_both_spellings_have_images_of_their_own(folder):
    folder.add("cafe\u0301.png")
    folder.write("metadata.jsonl", json.dumps({"file_name": "caf\u00e9.png", "text": "coffee"}))
    assert folder.captions(missing="skip") == {"cafe\u0301.png": ["coffee"]}
    names = ("cafe\u0301.png", "caf\u00e9.png", "na\u00efve.png")
    for name in names[1:]:
        folder.add(name)
    rows = [*((name, text) for name, text in zip(names, ("two", "one", "third"), strict=True)), ("cafe\u0301", "stem")]
    folder.write("metadata.jsonl", "\n".join(json.dumps({"file_name": name, "text": text}) for name, text in rows))
    assert folder.captions(missing="skip") == dict(zip(names, (["two", "stem"], ["one"], ["third"]), strict=True))


@pytest.mark.parametrize("name", ["data.csv", "metadata.json", "captions.txt.json"])
def test_a_table_of_captions_under_another_name_is_named_where_captions_are_missing(folder, name):
    folder.write(name, "file_name,text\na.png,a cat\n")
    with pytest.raises(ValueError, match=rf"no caption .*; {name} is not read: files of captions are metadata\.jsonl, "):
        folder.rows()


def test_an_image_in_a_tar_without_a_caption_is_an_error_of_one_line(folder):
    tarfile.open(folder.root / "train.tar", "w").close()
    folder.add("other/train.tar/1.png")
    folder.images[-1]["path"] = "train.tar/1.png"
    with pytest.raises(ValueError, match=r"3 of 3 images have no caption .*train\.tar/1\.png"):
        folder.rows()


def test_the_work_for_a_row_of_metadata_does_not_grow_with_the_number_of_rows(tmp_path):
    def calls(rows):
        names = [f"{n}.png" for n in range(rows)]
        (tmp_path / "metadata.jsonl").write_text("".join(f'{{"file_name": "{name}", "text": "x"}}\n' for name in names))
        count = itertools.count()
        sys.setprofile(lambda *event: next(count))
        try:
            found, wrong = read_metadata(tmp_path, names)
        finally:
            sys.setprofile(None)
        assert len(found) == rows and not wrong
        return next(count)

    assert calls(3000) < 12 * calls(300)
