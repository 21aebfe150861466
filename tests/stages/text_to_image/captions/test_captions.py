"""The stage captions over real files: where captions are found, which rows they become, and what is an error."""

import hashlib
import json
import os
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.project.parse import Parser
from schemas.text_to_image.captions import CAPTIONS
from schemas.text_to_image.images import IMAGES
from stages.text_to_image.captions.config import CaptionsConfig
from stages.text_to_image.captions.stage import STAGE
from tests.harness import context, run


class Folder:
    """An image folder: rows of the table images (the stage opens no image), and text files beside them."""

    def __init__(self, root: Path, *paths: str) -> None:
        self.root, self.lines, self.images = root, [], []
        for path in paths:
            self.add(path)

    def add(self, path, image_id="", rejected=None):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        row = {"path": path, "image_id": image_id or path, "bytes": 1, "mtime_ns": 1, "inode": 1, "format": "PNG", "mode": "RGB"}
        self.images.append(row | {"width": 64, "height": 64, "frames": 1, "rejected": rejected, "detail": ""})

    def write(self, name, text, encoding="utf-8"):
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(text if isinstance(text, bytes) else text.encode(encoding))

    def context(self, stored=None, **config):
        tables = {"images": IMAGES.table(self.images)}
        made = context(STAGE, self.root / "..", tables, config=CaptionsConfig(**config), stored=stored, source=self.root)
        made.say = self.lines.append
        return made

    def rows(self, **config):
        return run(STAGE, self.context(**config)).to_pylist()

    def captions(self, **config):
        """Return {image_id: texts in their order}."""
        found: dict[str, list[str]] = {}
        for row in sorted(self.rows(**config), key=lambda row: row["position"]):
            if row["role"] == "caption":
                found.setdefault(row["image_id"], []).append(row["text"])
        return found


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "images").mkdir()
    return Folder(tmp_path / "images", "a.png", "sub/b.jpg")


@pytest.fixture
def captioned(folder):
    folder.write("a.txt", "a cat")
    folder.write("sub/b.txt", "a dog")
    return folder


def test_a_sidecar_is_the_caption_and_the_row_says_where_it_came_from(captioned):
    rows = {row["image_id"]: row for row in captioned.rows() if row["role"] == "caption"}
    assert rows["sub/b.jpg"] == {
        "caption_id": hashlib.sha256(b"a dog").hexdigest(),
        "image_id": "sub/b.jpg",
        "role": "caption",
        "text": "a dog",
        "source": "sidecar",
        "origin": "sub/b.txt",
        "position": 0,
        "template": "{caption}",
        "reason": None,
        "weight": None,
    }


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
        ("caf\u00e9".encode("latin-1"), r"a\.txt is not UTF-8: byte 3 is 0xe9; save it as UTF-8"),
        (b"\xef\xbb\xbfab\xff", r"a\.txt is not UTF-8: byte 5 is 0xff"),
        ("cat".encode("utf-16-le"), r"a\.txt has a zero at byte 1, as UTF-16 without a byte order mark does"),
        (b"\xff\xfec\x00\x00\xd8", r"a\.txt is not UTF-16: byte"),
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


def test_several_captions_of_an_image_are_several_rows_and_equal_ones_are_one(folder):
    folder.write("sub/b.txt", "dog")
    rows = [
        {"file_name": "a.png", "text": ["one", "two", "one"]},
        {"file_name": "./a.png", "text": "three"},
        {"file_name": "a.png", "text": None},
    ]
    folder.write("metadata.jsonl", "\n".join(map(json.dumps, rows)))
    assert folder.captions()["a.png"] == ["one", "two", "three"]
    keys = [tuple(row[name] for name in CAPTIONS.key) for row in folder.rows()]
    assert len(set(keys)) == len(keys)


def test_the_first_source_that_has_a_caption_is_used(folder):
    folder.write("a.txt", "sidecar")
    rows = [{"file_name": "a.png", "text": "metadata"}, {"file_name": "sub\\b.jpg", "prompt": "metadata"}]
    folder.write("metadata.jsonl", "\n".join(map(json.dumps, rows)))
    assert folder.captions() == {"a.png": ["sidecar"], "sub/b.jpg": ["metadata"]}
    assert folder.captions(sources=("metadata", "sidecar"))["a.png"] == ["metadata"]
    assert folder.captions(sources=("filename",)) == {"a.png": ["a"], "sub/b.jpg": ["b"]}


def test_metadata_rows_without_an_image_are_reported_and_are_no_error(captioned):
    rows = [{"file_name": name, "text": "x"} for name in ("a.png", "gone.png", "b.jpg", "c.png", "d.png")]
    captioned.write("metadata.jsonl", "\n".join(map(json.dumps, rows)))
    captioned.rows()
    assert captioned.lines == ["metadata.jsonl: 4 rows name images that do not exist: gone.png, b.jpg, c.png and 1 more"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metadata.jsonl", '{"file_name": "a.png", "text": "x"}\n{"file_name": ', r"jsonl, line 2: not valid JSON at column 15"),
        ("metadata.jsonl", "[1]", r"line 1: must be a JSON object such as .*, got \[1\]"),
        ("metadata.jsonl", '{"image": "a.png", "text": "x"}', r"line 1: file_name must be a path; columns: image, text"),
        (
            "metadata.jsonl",
            '{"file_name": "a.png", "label": 3}',
            r"line 1: must have one of text, caption, prompt; columns: file_name, label",
        ),
        ("metadata.jsonl", '{"file_name": "a.png", "text": 3}', r"line 1: text must be a text or a list of texts, got 3"),
        (
            "metadata.csv",
            "file_name;text\na.png;x\n",
            r"metadata\.csv, line 1: columns must be separated by commas, got semicolons: file_name;text",
        ),
        ("metadata.jsonl", '{"file_name": "a.png", "text": "\\ud83d"}', r"metadata\.jsonl:1: .*half of a surrogate pair"),
    ],
)  # fmt: skip
def test_a_malformed_metadata_file_is_an_error_with_its_line(captioned, name, text, message):
    captioned.write(name, text)
    with pytest.raises(ValueError, match=message):
        captioned.rows(sources=("metadata", "sidecar"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "file_name,text\np0.png,a red, round thing\n",
            r"line 2: must have 2 fields \(file_name, text\), got 3; .* in double quotes",
        ),
        ("file_name,text\np0.png\n", r"line 2: must have 2 fields .*, got 1"),
        ('file_name,text\na.png,"a red\np1.png,x\n', r"line 2: not valid CSV: unexpected end of data"),
        ('file_name,text\na.png,"a red\np1.png,"blue"\n', r"line 2: not valid CSV"),
        ("file_name,text\na.png,x\nfile_name,text\nb.png,y\n", r"line 3: the names of the columns are there a second time"),
        ("file_name,text,text\na.png,x,y\n", r"line 1: the column text is there twice"),
        ("file_name,text\na.png," + "x" * 200_000, r"line 2: not valid CSV: field larger than field limit"),
    ],
)
def test_an_ambiguous_csv_is_refused_and_no_caption_is_cut(captioned, text, message):
    captioned.write("metadata.csv", text)
    with pytest.raises(ValueError, match=rf"metadata\.csv, {message}"):
        captioned.rows(sources=("metadata", "sidecar"))


def test_a_quoted_csv_text_is_taken_whole_also_after_a_space(folder):
    folder.write("metadata.csv", 'file_name, text\n\na.png, "a red, round thing"\nsub/b.jpg,a 5" nail\n')
    assert folder.captions() == {"a.png": ["a red, round thing"], "sub/b.jpg": ['a 5" nail']}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"file_name": "a.png", "text": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"file_name": "a.png", "text": "x", "text": "y"}', "the key 'text' is there twice"),
    ],
)
def test_a_hostile_line_of_json_is_one_line_with_its_place(captioned, line, message):
    captioned.write("metadata.jsonl", line)
    with pytest.raises(ValueError, match=rf"metadata\.jsonl, line 1: .*{message}"):
        captioned.rows(sources=("metadata", "sidecar"))


@pytest.mark.parametrize("text", ["a photo of [trigger]", "a photo of [Trigger]"])
def test_the_placeholder_of_ai_toolkit_becomes_the_trigger_once(captioned, text):
    captioned.write("a.txt", text)
    with pytest.raises(
        ValueError, match=r"^a\.txt: \[trigger\] stands for the trigger; set captions\.trigger, or write the word"
    ):
        captioned.rows()
    rows = captioned.rows(trigger="ohwx", template="{trigger}, {caption}")
    found = {row["image_id"]: (row["text"], row["template"], row["reason"]) for row in rows if row["role"] == "caption"}
    assert found == {
        "a.png": ("a photo of ohwx", "{caption}", "[trigger] in the caption was replaced by the trigger"),
        "sub/b.jpg": ("ohwx, a dog", "{trigger}, {caption}", None),
    }
    assert "[trigger] was replaced by the trigger in 1 of 2 captions" in captioned.lines


def test_a_caption_that_has_the_trigger_does_not_get_it_twice_and_the_run_says_so(captioned):
    captioned.write("a.txt", "a photo of ohwx")
    captioned.write("sub/b.txt", "ohwxes")  # another word
    rows = captioned.rows(trigger="ohwx", template="{trigger}, {caption}, film grain")
    found = {row["image_id"]: (row["text"], row["template"], row["reason"]) for row in rows if row["role"] == "caption"}
    assert found == {
        "a.png": ("a photo of ohwx, film grain", "{caption}, film grain", "the caption has the trigger"),
        "sub/b.jpg": ("ohwx, ohwxes, film grain", "{trigger}, {caption}, film grain", None),
    }
    said = "1 of 2 captions have the trigger already and do not get it a second time: a.txt and so on"
    assert said in captioned.lines
    assert captioned.captions(trigger="ohwx", template="a photo of {trigger}: {caption}")["a.png"] == ["a photo of ohwx"]
    assert captioned.captions(trigger="ohwx")["a.png"] == ["a photo of ohwx"]


@pytest.mark.parametrize("name", ["a.txt", "metadata.jsonl", "metadata.csv"])
def test_a_link_to_a_text_elsewhere_is_no_caption(captioned, tmp_path, name):
    (tmp_path / "secret").write_text("file_name,text\na.png,secret")
    (captioned.root / name).unlink(missing_ok=True)
    (captioned.root / name).symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=rf"{name} is a link to .*secret, in another folder: captions are not read from there"):
        captioned.rows()
    (captioned.root / name).unlink()
    (captioned.root / name).symlink_to("/proc/self/environ")
    with pytest.raises(ValueError, match="captions are not read from there"):
        captioned.rows()


def test_a_link_to_a_text_in_its_own_folder_is_read(captioned):
    (captioned.root / "a.txt").rename(captioned.root / "all.txt")
    (captioned.root / "a.txt").symlink_to("all.txt")
    assert captioned.captions()["a.png"] == ["a cat"]


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


def test_a_file_name_in_another_unicode_spelling_is_found(folder):
    folder.add("cafe\u0301.png")
    folder.write("metadata.jsonl", json.dumps({"file_name": "caf\u00e9.png", "text": "coffee"}))
    assert folder.captions(missing="skip") == {"cafe\u0301.png": ["coffee"]}


def test_notes_are_given_once_at_the_end_and_only_if_a_row_was_new(captioned):
    captioned.write("a.txt", "ohwx cat")
    made = captioned.context(trigger="ohwx")
    rows = pa.Table.from_batches(STAGE.run(made))
    assert captioned.lines == []
    assert list(STAGE.finish(made)) == [] and captioned.lines == ['the trigger "ohwx" is in only 1 of 2 captions']
    run(STAGE, captioned.context(rows, trigger="ohwx"))
    assert len(captioned.lines) == 1


def test_an_image_without_a_caption_is_an_error_that_names_the_first_few(folder):
    for number in range(5):
        folder.add(f"m{number}.png")
    folder.write("a.txt", "a cat")
    folder.write("m0.txt", " \n")
    with pytest.raises(
        ValueError, match=r"6 of 7 images have no caption \(sidecar or metadata\): m0.png, m1.png, m2.png and 3 more"
    ):
        folder.rows()
    with pytest.raises(
        ValueError, match=r"; write m0\.txt and so on beside them, let a model write them .*, or set captions.missing"
    ):
        folder.rows()


def test_a_missing_caption_is_replaced_as_the_setting_says(folder):
    folder.add("red_fox-2.png")
    folder.write("a.txt", "a cat")
    folder.write("sub/b.txt", "a dog")
    found = {
        missing: folder.captions(missing=missing, trigger="ohwx", template="{trigger}, {caption}").get("red_fox-2.png")
        for missing in ("empty", "trigger", "filename", "skip")
    }
    assert found == {"empty": [""], "trigger": ["ohwx"], "filename": ["ohwx, red fox 2"], "skip": None}
    assert "1 of 3 images have no caption (captions.missing = skip): red_fox-2.png" in folder.lines


def test_braces_in_a_caption_are_not_placeholders(folder):
    folder.write("a.txt", "{trigger} {caption} {x}")
    folder.write("sub/b.txt", "b")
    found = folder.captions(template="by {trigger}: {caption}!", trigger="{y}")
    assert found["a.png"] == ["by {y}: {trigger} {caption} {x}!"]


def test_a_template_without_caption_is_one_text_for_all_images_and_needs_no_files(folder):
    rows = [row for row in folder.rows(template="a photo of {trigger}", trigger="ohwx cat") if row["role"] == "caption"]
    assert {row["text"] for row in rows} == {"a photo of ohwx cat"} and len(rows) == 2
    assert len({row["caption_id"] for row in rows}) == 1 and {row["source"] for row in rows} == {"template"}


def test_a_trigger_in_no_caption_is_an_error_and_one_in_some_captions_is_reported(captioned):
    with pytest.raises(ValueError, match=r'captions.trigger "ohwx" is in none of the 2 captions: .* "{trigger}, {caption}"'):
        captioned.rows(trigger="ohwx")
    captioned.write("a.txt", "ohwx cat")
    captioned.rows(trigger="ohwx")
    assert captioned.lines == ['the trigger "ohwx" is in only 1 of 2 captions']


def test_the_empty_caption_and_the_preview_prompts_are_rows_without_an_image(captioned):
    prompts = ("a {trigger} at sea", "a boat", "a boat", "a dog")
    rows = captioned.rows(preview_prompts=prompts, trigger="ohwx", template="{caption}, {trigger}")
    assert [(r["image_id"], r["text"], r["source"]) for r in rows if r["role"] == "empty"] == [("", "", "config")]
    previews = [(row["position"], row["text"]) for row in rows if row["role"] == "preview"]
    assert previews == [(0, "a ohwx at sea"), (1, "a boat"), (2, "a dog")]


def test_the_trigger_alone_is_a_row_if_it_is_set(captioned):
    assert not [row for row in captioned.rows() if row["role"] == "trigger"]
    rows = captioned.rows(trigger="ohwx", template="{trigger}, {caption}")
    assert [(row["image_id"], row["text"], row["position"]) for row in rows if row["role"] == "trigger"] == [("", "ohwx", 0)]


def test_the_class_word_adds_rows_for_texts_with_the_trigger_and_changes_no_other_row(folder):
    folder.write("a.txt", "ohwx and ohwx\na dog\nohwx cat\ntoy and ohwx")
    folder.write("sub/b.txt", "ohwx cat")
    plain = folder.rows(trigger="ohwx", lines="many")
    rows = folder.rows(trigger="ohwx", lines="many", class_word="toy")
    assert [row for row in rows if row["role"] != "class"] == plain
    made = [(row["image_id"], row["text"], row["position"], row["origin"]) for row in rows if row["role"] == "class"]
    assert made == [
        ("a.png", "toy and toy", 0, "a.txt:1"),
        ("a.png", "toy cat", 2, "a.txt:3"),
        ("sub/b.jpg", "toy cat", 0, "sub/b.txt:1"),
        ("", "toy", 0, "captions.trigger"),
    ]
    keys = [tuple(row[name] for name in CAPTIONS.key) for row in rows]
    assert len(set(keys)) == len(keys)


def test_a_rejected_image_has_no_caption_but_a_caption_beside_a_duplicate_counts_for_the_image(folder):
    folder.images.clear()
    folder.add("a.png", "1")
    folder.add("b.png", "1", rejected="duplicate")
    folder.add("c.png", "2", rejected="truncated")
    folder.write("b.txt", "beside the duplicate")
    folder.write("c.txt", "beside a broken file")
    assert folder.captions() == {"1": ["beside the duplicate"]}
    folder.write("a.txt", "its own")
    assert folder.captions() == {"1": ["its own"]}
    folder.images = [row | {"rejected": "truncated"} for row in folder.images]
    with pytest.raises(ValueError, match="none of the 3 images can be used: 3 truncated"):
        folder.rows()


def test_one_edited_caption_makes_one_row_pending(captioned):
    stored = run(STAGE, captioned.context())
    assert run(STAGE, captioned.context(stored)).num_rows == 0
    captioned.write("a.txt", "another cat")
    pending = run(STAGE, captioned.context(stored)).to_pylist()
    assert [row["text"] for row in pending] == ["another cat"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sources": ["sidecars"]}, "sources must be a list of 'sidecar', 'metadata' or 'filename', got \\['sidecars'\\]"),
        ({"sources": []}, r"sources must name at least one source, .*, got \[\]"),
        ({"missing": "skipp"}, "missing must be 'error', .* or 'skip', got 'skipp'"),
        ({"lines": "all"}, "lines must be 'one' or 'many', got 'all'"),
        ({"template": "{captoin}"}, r"template must have no placeholder but .*, got \{captoin\}; did you mean \{caption\}\?"),
        ({"template": "{caption"}, r'template must have no braces but those of \{caption\} and \{trigger\}, got "\{caption"'),
        ({"template": "caption}"}, "template must have no braces but"),
        ({"template": "{{caption}}"}, "template must have no braces but"),
        ({"template": "[trigger] {caption}"}, r"template must not have ai-toolkit's \[trigger\]; write \{trigger\} instead"),
        ({"preview_prompts": ["[trigger]"]}, r"preview_prompts must not have ai-toolkit's \[trigger\]"),
        ({"template": " "}, "template must not be empty"),
        ({"template": "{trigger} {caption}"}, r"trigger must be set, because captions\.template has \{trigger\}"),
        ({"preview_prompts": ["{trigger}"]}, r"trigger must be set, because captions\.preview_prompts has \{trigger\}"),
        ({"preview_prompts": ["{caption}"]}, r"preview_prompts must have no placeholder but \{trigger\}, got \{caption\}"),
        ({"missing": "trigger"}, 'trigger must be set, because captions.missing is "trigger"'),
        ({"class_word": "cat"}, "trigger must be set, because captions.class_word takes its place"),
        ({"class_word": "a cat", "trigger": "cat"}, 'class_word must not contain the trigger "cat", got "a cat"'),
        ({"extension": "txt"}, 'extension must be a dot and a name such as ".txt", got "txt"'),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_it_and_the_remedy(wrong, message):
    with pytest.raises(ValueError, match=rf"^captions\..*{message}"):
        Parser({"captions": CaptionsConfig}, lambda key: "project.toml [captions]").section("captions", wrong)
