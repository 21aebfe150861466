"""The stage captions over real files: which rows captions become, what the settings do to them, and what is an error."""

import json

import pyarrow as pa
import pytest

from pipeline.project.config import Parser
from schemas.text_to_image import CAPTIONS
from stages.text_to_image.caption_files import Caption
from stages.text_to_image.captions.edits import write_edits
from stages.text_to_image.captions.stage import STAGE, CaptionsConfig, caption_doubts, operate, read_edits
from tests.harness import run


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


@pytest.mark.parametrize("text", ["a photo of [trigger]", "a photo of [Trigger]"])
def test_the_placeholder_of_ai_toolkit_becomes_the_trigger_once(captioned, text):
    captioned.write("a.txt", text)
    with pytest.raises(ValueError, match=r"^a\.txt: \[trigger\] stands for the trigger; set captions\.trigger"):
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
    assert any(line.startswith("1 of 2 captions have the trigger already") for line in captioned.lines)
    assert captioned.captions(trigger="ohwx", template="a photo of {trigger}: {caption}")["a.png"] == ["a photo of ohwx"]
    assert captioned.captions(trigger="ohwx")["a.png"] == ["a photo of ohwx"]


def test_notes_are_given_once_at_the_end_and_only_if_a_row_was_new(captioned):
    captioned.write("a.txt", "ohwx cat")
    made = captioned.context(trigger="ohwx")
    rows = pa.Table.from_batches(STAGE.run(made))
    assert captioned.lines == []
    assert list(STAGE.finish(made)) == [] and captioned.lines == ['the trigger "ohwx" is in only 1 of 2 captions']
    run(STAGE, captioned.context(rows, trigger="ohwx"))
    assert len(captioned.lines) == 1


def test_an_image_without_a_caption_is_an_error_that_names_the_first_few_and_the_remedies(folder):
    for number in range(5):
        folder.add(f"m{number}.png")
    folder.write("a.txt", "a cat")
    folder.write("m0.txt", " \n")
    said = r"6 of 7 images have no caption \(sidecar or metadata\): m0.png, m1.png, m2.png and 3 more"
    with pytest.raises(ValueError, match=rf"{said}; write m0\.txt and so on .*, let a model .*, or set captions.missing"):
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
    assert [(row["text"], row["source"]) for row in rows] == [("a photo of ohwx cat", "template")] * 2
    assert len({row["caption_id"] for row in rows}) == 1
    told = r'captions.template = "{}" has no {{caption}}: captions are not read, and all pictures get this text'
    assert told.format("a photo of {trigger}") in folder.lines
    assert [each.detail for each in caption_doubts(folder.context(template="foo"))] == [told.format("foo")]


def test_a_trigger_counts_and_gives_way_to_the_class_only_as_a_word_of_its_own(folder):
    folder.write("a.txt", "a party")
    folder.write("sub/b.txt", "art, a party")
    rows = folder.rows(trigger="art", class_word="cat", template="{caption}")
    assert folder.lines == ['the trigger "art" is in only 1 of 2 captions']
    assert [row["text"] for row in rows if row["role"] == "class"] == ["cat, a party", "cat"]
    folder.write("a.txt", "art\u732b\u5728")  # a script without spaces
    rows = folder.rows(trigger="art", class_word="cat", template="{trigger}, {caption}")
    assert [row["text"] for row in rows if row["image_id"] == "a.png"] == ["art\u732b\u5728", "cat\u732b\u5728"]
    for name in ("a.txt", "sub/b.txt"):
        folder.write(name, "the party")
    with pytest.raises(ValueError, match=r'captions.trigger "art" is in none of the 2 captions: .* "{trigger}, {caption}"'):
        folder.rows(trigger="art")


def test_the_empty_caption_the_trigger_and_the_preview_prompts_are_rows_without_an_image(captioned):
    prompts = ("a {trigger} at sea", "a boat", "a boat", "a dog")
    rows = captioned.rows(preview_prompts=prompts, trigger="ohwx", template="{caption}, {trigger}")
    own = [(row["role"], row["image_id"], row["text"], row["position"]) for row in rows if row["role"] != "caption"]
    previews = [("preview", "", text, n) for n, text in enumerate(("a ohwx at sea", "a boat", "a dog"))]
    assert sorted(own) == sorted([("empty", "", "", 0), *previews, ("trigger", "", "ohwx", 0)])
    assert not [row for row in captioned.rows() if row["role"] == "trigger"]


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
        ({"preview_prompts": ["{caption}"]}, r"preview_prompts must have no placeholder but \{trigger\}, got \{caption\}"),
        ({"class_word": "a cat", "trigger": "cat"}, 'class_word must not contain the trigger "cat", got "a cat"'),
        ({"extension": "txt"}, 'extension must be a dot and a name such as ".txt", got "txt"'),
        ({"replace": {"": "x"}}, "replace must name the words to replace"),
        ({"shuffle": -1}, "shuffle must be >= 0"),
        ({"weights": [1.0, 0.0]}, "weights must be >= 0.001 and <= 1000 each, got 0.0"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_it_and_the_remedy(wrong, message):
    with pytest.raises(ValueError, match=rf"^captions\..*{message}"):
        Parser({"captions": CaptionsConfig}, lambda key: "project.toml [captions]").section("captions", wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"template": "{trigger} {caption}"}, r"captions\.template has \{trigger\}"),
        ({"preview_prompts": ("{trigger}",)}, r"captions\.preview_prompts has \{trigger\}"),
        ({"missing": "trigger"}, 'captions.missing is "trigger"'),
        ({"class_word": "cat"}, "captions.class_word takes its place"),
    ],
)
def test_a_use_of_the_trigger_that_no_folder_and_no_setting_gives_is_an_error(captioned, wrong, message):
    with pytest.raises(ValueError, match=rf'^captions\.trigger must be set, because {message}, got ""$'):
        captioned.rows(**wrong)


@pytest.mark.parametrize(
    "text", ["one\u2028two", "one\u2029two", "one\x85two", "one\x0btwo\x0c", "one\x1btwo", "one\0two", "\ud800"]
)
def test_an_edited_caption_with_any_character_is_kept_as_it_is_or_refused_in_one_line(text, tmp_path):
    if text in ("one\0two", "\ud800"):
        with pytest.raises(ValueError, match="a caption must be"):
            write_edits(tmp_path, {"a:0": text})
        text = None
    else:
        write_edits(tmp_path, {"a:0": text})
    write_edits(tmp_path, {"b:0": "more"})
    assert read_edits(tmp_path) == {"b:0": "more"} | ({"a:0": text.strip()} if text else {})


def test_an_edit_that_a_kill_cut_short_is_dropped_and_the_edits_around_it_stay(tmp_path, monkeypatch):
    write_edits(tmp_path, {"a:0": "one\u2028line", "b:0": "two"})
    with (tmp_path / "captions.edits.jsonl").open("a") as file:
        file.write('{"key": "c:0", "te')
    assert read_edits(tmp_path) == {"a:0": "one\u2028line", "b:0": "two"}
    write_edits(tmp_path, {"b:0": None, "d:0": "three"})
    assert read_edits(tmp_path) == {"a:0": "one\u2028line", "d:0": "three"}
    with (tmp_path / "captions.edits.jsonl").open("a") as file:
        file.write('{"key": "c:0", "te{"key": "c:0", "text": "after"}\n')
    assert read_edits(tmp_path) == {"a:0": "one\u2028line", "c:0": "after", "d:0": "three"}
    before = (tmp_path / "captions.edits.jsonl").read_bytes()
    monkeypatch.setattr("os.fsync", lambda number: 1 / 0)  # killed before the new content is on disk
    with pytest.raises(ZeroDivisionError):
        write_edits(tmp_path, {"e:0": "four"})
    assert (tmp_path / "captions.edits.jsonl").read_bytes() == before


TAGS = "ohwx cat, sitting, Watermark, on grass, blue sky, watermark"


def texts(text: str, image_id: str = "image", **config: object) -> list[str]:
    return [each.text for each in operate([Caption(text, "sidecar", "a.txt")], CaptionsConfig(**config), image_id)]


def test_words_are_replaced_in_the_order_of_the_setting_then_parts_are_dropped():
    assert texts(" a cat , and  a dog") == [" a cat , and  a dog"], "without settings"
    assert texts(TAGS, replace={"ohwx": "sks", "sks cat": "sks"}, drop=("watermark",)) == ["sks, sitting, on grass, blue sky"]


def test_shuffled_captions_keep_their_head_and_their_parts_and_differ_between_images():
    found = texts(TAGS, drop=("watermark",), shuffle=20, keep=1)
    assert len(found) == 20 and len(set(found)) == 6, "all orders of three parts"
    assert all(each.startswith("ohwx cat, ") and sorted(each.split(", ")) == sorted(found[0].split(", ")) for each in found)
    assert found == texts(TAGS, drop=("watermark",), shuffle=20, keep=1)
    assert found[:6] == texts(TAGS, drop=("watermark",), shuffle=6, keep=1), "more orders change none of those before"
    assert found != texts(TAGS, "another image", drop=("watermark",), shuffle=20, keep=1)


def test_captions_have_the_weights_of_their_positions_and_their_orders_share_them():
    captions = [Caption(text, "sidecar", "a.txt") for text in ("a, b, c", "d", "e")]
    assert [each.weight for each in operate(captions, CaptionsConfig(), "image")] == [None] * 3
    assert [each.weight for each in operate(captions, CaptionsConfig(weights=(3.0, 1.0)), "image")] == [3.0, 1.0, 1.0]
    shuffled = operate(captions, CaptionsConfig(weights=(3.0, 1.0), shuffle=2), "image")
    assert [each.weight for each in shuffled] == [1.5, 1.5, 0.5, 0.5, 0.5, 0.5]
