"""The folders that people have, as other trainers document them, go through the whole pipeline as they are."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pipeline.commands.init import new_project
from pipeline.project.project import Project
from tests.projects import CONFIG, MATERIAL, Silent, build

PICTURES = sorted(path for path in (MATERIAL / "images").iterdir() if path.suffix in (".png", ".jpg"))
TRIGGER = 'trigger = "ohwx"\ntemplate = "{trigger}, {caption}"\n'


A, B, C, D = (path.suffix for path in PICTURES[:4])
Files = dict[str, str | None]  # by path: a text, or None for a picture; the suffix of the first picture is A, of the next B


@dataclass
class Layout:
    """A folder in one convention."""

    files: Files
    line: str  # what the run says about it
    texts: dict[str, tuple[str, str, str | None]]  # path -> (text, source, reason)
    more: dict[str, str] = field(default_factory=dict)  # lines of project.toml by section


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def lay(folder: Path, files: Files) -> None:
    pictures = iter(PICTURES)
    for name, text in files.items():
        write(folder / name, text or "")
        if text is None:
            shutil.copy(next(pictures), folder / name)


KOHYA = {
    f"img/10_ohwx cat/a0{A}": None,
    "img/10_ohwx cat/a0.txt": "ohwx cat, photo 0",
    f"img/10_ohwx cat/a1{B}": None,
    "img/10_ohwx cat/a1.txt": "ohwx cat, photo 1",
    f"img/2_ohwx toy/b{C}": None,
    f"reg/1_cat/r{D}": None,
}
TWO = {f"a0{A}": None, f"a1{B}": None}
TWO_TEXTS = {f"a0{A}": ("red, round", "metadata", None), f"a1{B}": ("blue", "metadata", None)}
FOLDERS = """
[[images.folder]]
path = "images/a"
repeats = 3
trigger = "sks"

[[images.folder]]
path = "images/b"
trigger = ""
"""
LAYOUTS = {
    "kohya": Layout(
        KOHYA,
        "kohya folder: 10 repeats of 'ohwx cat', 2 images; 2 repeats of 'ohwx toy', 1 image; reg/1_cat/: 1 class image of 'cat'",
        {
            f"img/10_ohwx cat/a0{A}": ("ohwx cat, photo 0", "sidecar", "the caption has the trigger"),
            f"img/10_ohwx cat/a1{B}": ("ohwx cat, photo 1", "sidecar", "the caption has the trigger"),
            f"img/2_ohwx toy/b{C}": ("ohwx toy", "folder", "the caption has the trigger"),
            f"reg/1_cat/r{D}": ("cat", "folder", "a regularisation image has no trigger"),
        },
        {"captions": TRIGGER},
    ),
    "txt and caption": Layout(
        {f"a{A}": None, "a.txt": "from txt", "a.caption": "from caption", f"b{B}": None, "b.caption": "only caption"},
        "2 captions: 1 from .txt, 1 from .caption",
        {f"a{A}": ("from txt", "sidecar", None), f"b{B}": ("only caption", "sidecar", None)},
    ),
    "folder of captions": Layout(
        {f"images/a0{A}": None, f"images/a1{B}": None, "captions/a0.txt": "apart 0", "captions/a1.txt": "apart 1"},
        "2 files: 2 usable",
        {f"images/a0{A}": ("apart 0", "sidecar", None), f"images/a1{B}": ("apart 1", "sidecar", None)},
    ),
    "captions elsewhere": Layout(
        {f"sub/a{A}": None, "../words/sub/a.txt": "elsewhere"},
        "1 file: 1 usable",
        {f"sub/a{A}": ("elsewhere", "sidecar", None)},
        {"captions": 'folder = "words"\n'},
    ),
    "captions.json, a map": Layout(
        TWO
        | {f"a2{C}": None}
        | {"captions.json": f'{{"a0{A}": "whole name", "a1": ["stem"], "/workspace/old/a2{C}": {{"caption": "far"}}}}'},
        "3 captions: 3 from captions.json",
        {f"a{n}{end}": (text, "metadata", None) for n, end, text in ((0, A, "whole name"), (1, B, "stem"), (2, C, "far"))},
    ),
    **{
        name: Layout(TWO | {name: text}, f"2 captions: 2 from {name}", TWO_TEXTS)
        for name, text in {
            "captions.json": f'[{{"image": "a0{A}", "prompt": "red, round"}}, {{"path": "a1{B}", "caption": "blue"}}]',
            "captions.csv": f'image,caption\na0{A},"red, round"\na1{B},blue\n',
            "captions.tsv": f"image\tcaption\na0{A}\tred, round\na1{B}\tblue\n",
        }.items()
    },
    "imagefolder": Layout(
        {f"train/{name}": None for name in TWO}
        | {"train/metadata.jsonl": "\n".join(f'{{"file_name": "{name}", "additional_feature": "of {name}"}}' for name in TWO)},
        "2 captions: 2 from metadata.jsonl",
        {f"train/{name}": (f"of {name}", "metadata", None) for name in TWO},
        {"captions": 'caption_column = "additional_feature"\n'},
    ),
    "several folders": Layout(
        {f"a/x{A}": None, "a/x.txt": "a boat", f"b/y{B}": None, "b/y.txt": "a house"},
        "folders: a/: 1 image, 3 repeats, trigger 'sks'; b/: 1 image",
        {f"a/x{A}": ("sks, a boat", "sidecar", None), f"b/y{B}": ("a house", "sidecar", "its folder has no trigger")},
        {"captions": TRIGGER, "": FOLDERS},
    ),
}


def project(folder: Path, weights: Path, files: Files, more: dict[str, str]) -> Path:
    lay(folder / "images", files)
    config = CONFIG.format(weights=weights, family="tiny").replace("steps = 6", "steps = 1").replace("[64, 96]", "[64]")
    config = config.replace("[captions]\n", f"{more.get('', '')}\n[captions]\n{more.get('captions', '')}")
    write(folder / "project.toml", config)
    return folder


def texts(folder: Path) -> dict[str, tuple[str, str, str | None]]:
    """By the path of their image: (text, source, reason)."""
    made = Project(folder)
    paths = {row["image_id"]: row["path"] for row in made.current("images").rows().to_pylist()}
    rows = [row for row in made.current("captions").rows().to_pylist() if row["role"] == "caption"]
    return {paths[row["image_id"]]: (row["text"], row["source"], row["reason"]) for row in rows}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_of_another_trainer_is_recognised_in_one_line_and_trained_as_it_is(name, tmp_path, tiny_weights):
    layout, console = LAYOUTS[name], Silent()
    folder = project(tmp_path / "project", tiny_weights, layout.files, layout.more)
    trained = ("buckets", "latents", "embeddings", "train") if name in ("kohya", "several folders") else ()  # images from two
    build(folder, "images", "captions", *trained, console=console)
    assert layout.line in console.lines
    assert texts(folder) == layout.texts
    assert build(folder, "images", "captions", console=Silent())["images"].written == 0


def test_a_onetrainer_file_of_concepts_becomes_a_project_that_trains(tmp_path, tiny_weights):
    data = tmp_path / "data"
    lay(data, {f"cat/x{A}": None, "cat/x.txt": "a cat", f"dog/y{B}": None, "dog/y.txt": "a dog"})
    usual = {"image": {}, "text": {"prompt_source": "sample", "prompt_path": ""}, "include_subdirectories": False}
    usual |= {"loss_weight": 1.0, "enabled": True, "balancing_strategy": "REPEATS"}
    concepts = [
        usual | {"name": "cat", "path": str(data / "cat"), "balancing": 4.0},
        usual | {"name": "dog", "path": "dog", "balancing": 1.0},
        usual | {"name": "old", "path": "/gone", "enabled": False},
    ]
    write(data / "concepts.json", json.dumps(concepts))
    new_project(tmp_path / "new", {"images": str(data / "concepts.json"), "family": "tiny", "weights": str(tiny_weights)})
    text = (tmp_path / "new/project.toml").read_text()
    assert "# old: not enabled in OneTrainer" in text
    write(tmp_path / "new/project.toml", text.replace("steps = ", "steps = 1  # ").replace("[512, 768]", "[64]"))
    console = Silent()
    build(tmp_path / "new", "images", "captions", "buckets", "latents", "embeddings", "train", console=console)
    assert "folders: cat/: 1 image, 4 repeats; dog/: 1 image, 1 repeats" in console.lines
    assert {text for text, _, _ in texts(tmp_path / "new").values()} == {"a cat", "a dog"}


def test_a_renamed_folder_changes_the_repeats_and_no_file_is_read_again(tmp_path, tiny_weights, monkeypatch):
    folder = project(tmp_path / "project", tiny_weights, KOHYA, {"captions": TRIGGER})
    build(folder, "images", "captions")
    (folder / "images/img/10_ohwx cat").rename(folder / "images/img/5_ohwx cat")
    build(folder, "images")
    rows = {row["path"]: row["repeats"] for row in Project(folder).current("images").rows().to_pylist()}
    assert rows[f"img/5_ohwx cat/a0{A}"] == 5
    monkeypatch.setattr("stages.text_to_image.images.stage.probe", None)
    (folder / "project.toml").write_text((folder / "project.toml").read_text() + '\n[images]\nlayout = "plain"\n')
    build(folder, "images")
    assert {row["repeats"] for row in Project(folder).current("images").rows().to_pylist()} == {None}


# Folders that cannot be trained as they are


ONE = {f"a{A}": None}
OTHER_COLUMN = {"captions": 'caption_column = "txet"\n'}
Wrong = tuple[Files, dict[str, str], str]  # files, lines of project.toml by section, what is said
WRONG: dict[str, Wrong] = {
    "only reg": ({f"reg/1_cat/a{A}": None}, {}, "only regularisation images, in reg/1_cat/: add .* or set images.layout"),
    "videos": ({"a.mp4": "x"}, {}, r"no images, but 1 \.mp4 file, such as a\.mp4: videos are not read: save frames as"),
    "other names": (
        ONE | {"a_caption.txt": "a cat"},
        {},
        r"1 of 1 images have no caption .*; 1 text files have the name of no image: a_caption\.txt$",
    ),
    "other paths": (
        ONE | {"captions.json": '{"train/a.png": "a cat"}'},
        {},
        r"1 of 1 images have no caption .*; captions\.json: 1 row names an image that does not exist: train/a\.png;",
    ),
    "other column": (
        ONE | {"metadata.jsonl": f'{{"file_name": "a{A}", "text": "a cat"}}'},
        OTHER_COLUMN,
        r"metadata\.jsonl, line 1: captions\.caption_column must name a column, got 'txet'; columns: .*text\?$",
    ),
    "no folder of captions": (ONE, {"captions": 'folder = "words"\n'}, "must be a folder of caption files, got 'words'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_layout_is_one_line_that_says_what_was_found_and_what_would_be_right(name, tmp_path, tiny_weights):
    files, more, said = WRONG[name]
    folder = project(tmp_path / "project", tiny_weights, files, more)
    with pytest.raises(ValueError, match=said) as caught:
        build(folder, "images", "captions")
    assert "\n" not in str(caught.value)
