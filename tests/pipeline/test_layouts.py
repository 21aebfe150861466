"""The folders that people have, as other trainers document them, go through the whole pipeline as they are."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.commands.init import new_project
from pipeline.project.project import Project
from tests.projects import CONFIG, MATERIAL, Silent, build

PICTURES = sorted(path for path in (MATERIAL / "images").iterdir() if path.suffix in (".png", ".jpg"))
TRIGGER = 'trigger = "ohwx"\ntemplate = "{trigger}, {caption}"\n'


@dataclass
class Layout:
    """A folder in one convention. `make` writes it, and returns further lines of project.toml by section. `line` is what the
    run says about it. `texts` are the training texts of its images, by path.
    """

    make: Callable[[Path], dict[str, str]]
    line: str
    texts: dict[str, tuple[str, str, str | None]]  # path -> (text, source, reason)


def picture(path: Path, number: int) -> Path:
    """Its suffix is the picture's own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(PICTURES[number], path.with_suffix(PICTURES[number].suffix)))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def kohya(images: Path) -> dict[str, str]:
    for number in range(2):
        write(picture(images / "img/10_ohwx cat" / f"a{number}.png", number).with_suffix(".txt"), f"ohwx cat, photo {number}")
    picture(images / "img/2_ohwx toy" / "b.png", 2)
    picture(images / "reg/1_cat" / "r.png", 3)
    return {"captions": TRIGGER}


def captions_beside(images: Path) -> dict[str, str]:
    first, second = picture(images / "a.png", 0), picture(images / "b.png", 1)
    for name, text in ((first.with_suffix(".txt"), "from txt"), (first.with_suffix(".caption"), "from caption")):
        write(name, text)
    write(second.with_suffix(".caption"), "only caption")
    return {}


def captions_apart(images: Path) -> dict[str, str]:
    for number in range(2):
        picture(images / "images" / f"a{number}.png", number)
        write(images / "captions" / f"a{number}.txt", f"apart {number}")
    return {}


def captions_elsewhere(images: Path) -> dict[str, str]:
    picture(images / "sub/a.png", 0)
    write(images.parent / "words/sub/a.txt", "elsewhere")
    return {"captions": 'folder = "words"\n'}


def json_map(images: Path) -> dict[str, str]:
    names = [picture(images / f"a{number}.png", number).name for number in range(3)]
    entries = {
        names[0]: "whole name",
        Path(names[1]).stem: ["stem"],
        f"/workspace/old/{names[2]}": {"caption": "absolute", "tags": "x"},
    }
    write(images / "captions.json", json.dumps(entries))
    return {}


def json_list(images: Path) -> dict[str, str]:
    names = [picture(images / f"a{number}.png", number).name for number in range(2)]
    write(images / "captions.json", json.dumps([{"image": names[0], "prompt": "one"}, {"path": names[1], "caption": "two"}]))
    return {}


def table(name: str, delimiter: str) -> Callable[[Path], dict[str, str]]:
    def make(images: Path) -> dict[str, str]:
        names = [picture(images / f"a{number}.png", number).name for number in range(2)]
        with (images / name).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter=delimiter).writerows([["image", "caption"], [names[0], "red, round"], [names[1], "blue"]])
        return {}

    return make


def imagefolder(images: Path) -> dict[str, str]:
    names = [picture(images / "train" / f"a{number}.png", number).name for number in range(2)]
    rows = [{"file_name": name, "additional_feature": f"feature {number}"} for number, name in enumerate(names)]
    write(images / "train/metadata.jsonl", "\n".join(map(json.dumps, rows)))
    return {"captions": 'caption_column = "additional_feature"\n'}


def ai_toolkit(images: Path) -> dict[str, str]:
    write(picture(images / "a.png", 0).with_suffix(".txt"), "[trigger] in a picture of a boat")
    write(picture(images / "b.png", 1).with_suffix(".txt"), "a house")
    return {"captions": TRIGGER}


def several(images: Path) -> dict[str, str]:
    write(picture(images / "a/x.png", 0).with_suffix(".txt"), "a boat")
    write(picture(images / "b/y.png", 1).with_suffix(".txt"), "a house")
    entries = '[[images.folder]]\npath = "images/a"\nrepeats = 3\ntrigger = "sks"\n\n'
    entries += '[[images.folder]]\npath = "images/b"\ntrigger = ""\n'
    return {"captions": TRIGGER, "": entries}


A, B, C, D = (path.suffix for path in PICTURES[:4])
LAYOUTS = {
    "kohya": Layout(
        kohya,
        "kohya folder: 10 repeats of 'ohwx cat', 2 images; 2 repeats of 'ohwx toy', 1 image; reg/1_cat/: 1 class image of 'cat'",
        {
            f"img/10_ohwx cat/a0{A}": ("ohwx cat, photo 0", "sidecar", "the caption has the trigger"),
            f"img/10_ohwx cat/a1{B}": ("ohwx cat, photo 1", "sidecar", "the caption has the trigger"),
            f"img/2_ohwx toy/b{C}": ("ohwx toy", "folder", "the caption has the trigger"),
            f"reg/1_cat/r{D}": ("cat", "folder", "a regularisation image has no trigger"),
        },
    ),
    "txt and caption": Layout(
        captions_beside,
        "2 captions: 1 from .txt, 1 from .caption",
        {f"a{A}": ("from txt", "sidecar", None), f"b{B}": ("only caption", "sidecar", None)},
    ),
    "folder of captions": Layout(
        captions_apart,
        "2 files: 2 usable",
        {f"images/a0{A}": ("apart 0", "sidecar", None), f"images/a1{B}": ("apart 1", "sidecar", None)},
    ),
    "captions elsewhere": Layout(captions_elsewhere, "1 file: 1 usable", {f"sub/a{A}": ("elsewhere", "sidecar", None)}),
    "captions.json, a map": Layout(
        json_map,
        "3 captions: 3 from captions.json",
        {
            f"a0{A}": ("whole name", "metadata", None),
            f"a1{B}": ("stem", "metadata", None),
            f"a2{C}": ("absolute", "metadata", None),
        },
    ),
    "captions.json, a list": Layout(
        json_list,
        "2 captions: 2 from captions.json",
        {f"a0{A}": ("one", "metadata", None), f"a1{B}": ("two", "metadata", None)},
    ),
    "captions.csv": Layout(
        table("captions.csv", ","),
        "2 captions: 2 from captions.csv",
        {f"a0{A}": ("red, round", "metadata", None), f"a1{B}": ("blue", "metadata", None)},
    ),
    "captions.tsv": Layout(
        table("captions.tsv", "\t"),
        "2 captions: 2 from captions.tsv",
        {f"a0{A}": ("red, round", "metadata", None), f"a1{B}": ("blue", "metadata", None)},
    ),
    "imagefolder": Layout(
        imagefolder,
        "2 captions: 2 from metadata.jsonl",
        {f"train/a0{A}": ("feature 0", "metadata", None), f"train/a1{B}": ("feature 1", "metadata", None)},
    ),
    "ai-toolkit": Layout(
        ai_toolkit,
        "[trigger] was replaced by the trigger in 1 of 2 captions",
        {
            f"a{A}": ("ohwx in a picture of a boat", "sidecar", "[trigger] in the caption was replaced by the trigger"),
            f"b{B}": ("ohwx, a house", "sidecar", None),
        },
    ),
    "several folders": Layout(
        several,
        "folders: a/: 1 image, 3 repeats, trigger 'sks'; b/: 1 image",
        {f"a/x{A}": ("sks, a boat", "sidecar", None), f"b/y{B}": ("a house", "sidecar", "its folder has no trigger")},
    ),
}


def project(folder: Path, weights: Path, more: dict[str, str]) -> Path:
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
    folder = project(tmp_path / "project", tiny_weights, layout.make(tmp_path / "project" / "images"))
    trained = ("buckets", "latents", "embeddings", "train") if name in ("kohya", "several folders") else ()  # images from two
    build(folder, "images", "captions", *trained, console=console)
    assert layout.line in console.lines
    assert texts(folder) == layout.texts
    assert build(folder, "images", "captions", console=Silent())["images"].written == 0


def test_a_onetrainer_file_of_concepts_becomes_a_project_that_trains(tmp_path, tiny_weights):
    data = tmp_path / "data"
    write(picture(data / "cat/x.png", 0).with_suffix(".txt"), "a cat")
    write(picture(data / "dog/y.png", 1).with_suffix(".txt"), "a dog")
    usual = {
        "image": {},
        "text": {"prompt_source": "sample", "prompt_path": ""},
        "include_subdirectories": False,
        "loss_weight": 1.0,
    }
    concepts = [
        usual | {"name": "cat", "path": str(data / "cat"), "enabled": True, "balancing": 4.0, "balancing_strategy": "REPEATS"},
        usual | {"name": "dog", "path": "dog", "enabled": True, "balancing": 1.0, "balancing_strategy": "REPEATS"},
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
    folder = project(tmp_path / "project", tiny_weights, kohya(tmp_path / "project" / "images"))
    build(folder, "images", "captions")
    (folder / "images/img/10_ohwx cat").rename(folder / "images/img/5_ohwx cat")
    build(folder, "images")
    rows = {row["path"]: row["repeats"] for row in Project(folder).current("images").rows().to_pylist()}
    assert rows[f"img/5_ohwx cat/a0{A}"] == 5
    monkeypatch.setattr("stages.text_to_image.images.stage.probe", None)
    (folder / "project.toml").write_text((folder / "project.toml").read_text() + '\n[images]\nlayout = "plain"\n')
    build(folder, "images")
    assert {row["repeats"] for row in Project(folder).current("images").rows().to_pylist()} == {None}
