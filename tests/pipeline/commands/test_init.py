"""New projects: the options of `latentmill init`, and the first settings of each model family."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli import cli
from pipeline.commands.init import new_project
from pipeline.project.project import Project
from stages.text_to_image.captions.stage import caption_doubts
from stages.text_to_image.families import FAMILIES, family
from stages.text_to_image.samples.stage import references_by_prompt
from stages.text_to_image.template import PRESETS, SLIDER
from tests.projects import build, draw, edit, report
from tests.stages.retrieval.project import run, write

TRAINED = [name for name, record in FAMILIES.items() if not record.base]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    (folder / "control").mkdir(parents=True)
    draw(folder / "a.png", seed=0, size=(64, 64))
    return folder


@pytest.mark.parametrize("name", TRAINED)
def test_a_new_project_has_its_familys_source_of_weights_its_own_settings_and_the_usual_ones_for_the_rest(tmp_path, images, name):
    new_project(tmp_path / "new", {"images": str(images), "family": name})
    made = Project(tmp_path / "new")
    assert made.family is family(name)
    assert f'weights = ""  # a folder or a hub id; empty: {made.family.source}' in (tmp_path / "new/project.toml").read_text()
    sections = made.config.sections
    for section, settings in family(name).begin.items():
        first, *inner = section.split(".")
        holder = getattr(sections[first], inner[0]) if inner else sections[first]
        assert {key: getattr(holder, key) for key in settings} == settings
    own = family(name).begin.get("train", {})
    assert sections["train"].steps == own.get("steps", 1500)
    assert sections["samples"].checkpoints == "all"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"images": "a.png", "family": "micro"},
            r"a\.png: must be a folder of images, such as .*images, or OneTrainer's concepts",
        ),
        (
            {"family": "z-image", "preset": "edit"},
            r"^--preset edit: z-image reads no reference images; take another preset, or an",
        ),
        ({"family": "micro", "preset": "stile"}, r'--preset must be one of .*, got "stile"; did you mean "style"'),
    ],
)
def test_a_wrong_wish_is_refused_before_anything_is_written(tmp_path, images, options, said):
    draw(images / "control" / "a.png", seed=9, size=(64, 64))
    with pytest.raises(ValueError, match=said):
        new_project(tmp_path / "new", options | {"images": str(images / options.get("images", ""))})
    assert not (tmp_path / "new").exists()


def test_a_distilled_family_is_refused_by_init_plan_and_the_first_stage_with_the_base_to_train_on(tmp_path, images):
    why = r'klein-4b is distilled: .* Train on its base, family = "klein-base-4b"; the LoRA can be used on klein-4b'
    with pytest.raises(ValueError, match=why):
        new_project(tmp_path / "new", {"images": str(images), "family": "klein-4b"})
    (tmp_path / "project.toml").write_text('[project]\nfamily = "klein-4b"\n')
    with pytest.raises(ValueError, match=why):
        report(Project(tmp_path))
    with pytest.raises(ValueError, match=why):
        build(tmp_path, "images")
    assert not (tmp_path / "tables").exists()


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != SLIDER])
def test_a_preset_writes_its_settings_with_their_reasons_into_a_project_that_can_be_opened(tmp_path, images, preset):
    draw(images / ("control" if preset == "edit" else ".") / "a.png", seed=9, size=(64, 64))
    for trigger in ("", "ohwx"):
        folder = tmp_path / f"{preset}{trigger}"
        new_project(folder, {"images": str(images), "family": "klein-base-4b", "preset": preset, "trigger": trigger})
        text, sections = (folder / "project.toml").read_text(), Project(folder).config.sections
        assert sections["captions"].missing == ("trigger" if trigger else "error")
        for section, settings in PRESETS[preset].items():
            first, *inner = section.split(".")
            holder = getattr(sections[first], inner[0]) if inner else sections[first]
            for name, (value, reason) in settings.items():
                if trigger or name != "dropped":
                    assert getattr(holder, name) == value and reason in text


def test_a_project_for_edits_begins_with_previews_of_its_pairs_and_names_the_picture_without_one(tmp_path, images):
    options = {"images": str(images), "family": "tiny", "preset": "edit"}
    with pytest.raises(ValueError, match=r"no picture in .*images has a reference: put .* into .*control, under the same names$"):
        new_project(tmp_path / "new", options)
    assert not (tmp_path / "new").exists()
    for number, name in enumerate(("b.png", "c.png", "control/a.png", "control/b.png")):
        draw(images / name, seed=1 + number, size=(64, 64))
    for name in "abc":
        (images / f"{name}.txt").write_text("make it snow in the quiet street")
    new_project(tmp_path / "new", options)
    build(tmp_path / "new", "images", "captions", "checks")
    project = Project(tmp_path / "new")
    found = references_by_prompt(project.open("samples"))
    assert {prompt: [path.resolve() for path in paths] for prompt, paths in found.items()} == {
        "make it snow in the quiet street": [images / "control" / "a.png"]
    }
    warnings = {row["path"]: row["warnings"].split(", ") for row in project.current("checks").rows().to_pylist()}
    assert [path for path, own in warnings.items() if "no_reference" in own] == ["c.png"]
    assert not [path for path, own in warnings.items() if "equal_caption" in own]


def test_another_subject_is_added_to_a_new_project_by_one_more_folder_with_its_own_trigger(tmp_path, images):
    for number, name in enumerate(("cat/a.png", "dog/a.png", "dog/b.png")):
        (images / name).parent.mkdir(exist_ok=True)
        draw(images / name, seed=1 + number, size=(64, 64))
    (images / "dog" / "a.txt").write_text("runs")
    new_project(tmp_path / "new", {"images": str(images), "family": "tiny", "trigger": "ohwx cat"})
    file = tmp_path / "new" / "project.toml"
    file.write_text(file.read_text() + '\n[[images.folder]]\npath = "../images/dog"\ntrigger = "sks dog"\n')

    def texts(role: str) -> list[str]:
        build(tmp_path / "new", "images", "captions")
        rows = Project(tmp_path / "new").current("captions").rows().to_pylist()
        return [row["text"] for row in sorted(rows, key=lambda row: row["position"]) if row["role"] == role]

    assert sorted(texts("caption")) == ["ohwx cat", "ohwx cat", "sks dog", "sks dog, runs"]
    assert texts("preview") == ["a photo of ohwx cat", "a photo of sks dog"]
    edit(tmp_path / "new", "[samples]", '[samples]\nprompt_references = {"a photo of {trigger}" = ["a.png"]}')
    found = references_by_prompt(Project(tmp_path / "new").open("samples"))
    assert {prompt: len(paths) for prompt, paths in found.items()} == dict.fromkeys(texts("preview"), 1)
    edit(tmp_path / "new", 'trigger = "ohwx cat"', 'trigger = ""')
    with pytest.raises(ValueError, match=r'template has \{trigger\}, got ""; a\.png, cat/a\.png are in no .* with a trigger'):
        texts("caption")
    edit(tmp_path / "new", 'path = "../images" ', 'trigger = "ohwx cat"\npath = "../images" ')
    assert sorted(texts("caption")) == ["ohwx cat", "ohwx cat", "sks dog", "sks dog, runs"]
    assert sorted(texts("preview")) == ["a photo of ohwx cat", "a photo of sks dog"]


def test_init_says_what_lies_in_the_folder_and_gives_each_kohya_subject_its_own_trigger(tmp_path):
    folder, made = tmp_path / "img", tmp_path / "new"
    for number, name in enumerate(("10_sks cat/a.jpg", "10_sks cat/b.png", "5_blue vase/a.png", "reg/1_cat/a.png")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        draw(folder / name, seed=number, size=(64, 64))
    (folder / "10_sks cat" / "a.txt").write_text("sks cat on a sofa")
    options = {"images": str(folder), "family": "tiny", "preset": "subject"}
    refused = r'--trigger "sks cat" \(TRIGGER with make\) would be the word of 2 subjects: 10_sks .*, 5_blue .*; leave it out'
    with pytest.raises(ValueError, match=refused):
        new_project(made, options | {"trigger": "sks cat"})
    said = new_project(made, options)
    assert said[1:] == [
        f"  3 pictures in {folder}: 2 PNG, 1 JPEG",
        "  1 with a caption, 2 without: their trigger alone will be trained",
        "  10_sks cat: 2 pictures, 10 repeats, trigger 'sks cat'",
        "  5_blue vase: 1 picture, 5 repeats, trigger 'blue vase'",
        "  1 picture of the class (regularisation)",
        "  500 steps: 3 pictures x 50 passes, at least 500 draws, in batches of 1 ([train] steps, passes)",
        "read it through, then:",
        *(f"  make {target} PROJECT={made}" for target in ("plan", "lint", "train")),
    ]
    build(made, "images", "captions")
    rows = Project(made).current("captions").rows().to_pylist()
    texts = sorted(row["text"] for row in rows if row["role"] == "caption" and row["text"] != "cat")
    assert texts == ["blue vase", "sks cat", "sks cat on a sofa"]
    assert {row["text"] for row in rows if row["role"] == "preview"} == {"a photo of sks cat", "a photo of blue vase"}
    assert {row["repeats"] for row in Project(made).current("images").rows().to_pylist()} == {10, 5, 1}
    # By hand, one trigger for both: the stage and lint say so.
    first, *_, rest = (made / "project.toml").read_text().split("[[images.folder]]")
    text = f"{first}[[images.folder]]\npath = '{folder}'\n\n[captions]{rest.partition('[captions]')[2]}"
    (made / "project.toml").write_text(text.replace('trigger = ""', 'trigger = "sks cat"'))
    build(made, "images")
    doubts = [each.detail for each in caption_doubts(Project(made).open("captions"))]
    assert '2 subjects (10_sks cat, 5_blue vase) are trained with one trigger, "sks cat": give each an [[images' in doubts[0]
    # Pictures beside the subjects' folders: TRIGGER is theirs.
    draw(folder / "c.webp", seed=9, size=(64, 64))
    assert any("1 picture in no such folder: they have no trigger" in line for line in new_project(tmp_path / "third", options))
    build(tmp_path / "third", "images", "captions")
    new_project(tmp_path / "fourth", options | {"trigger": "zwx"})
    build(tmp_path / "fourth", "images", "captions")
    rows = Project(tmp_path / "fourth").current("captions").rows().to_pylist()
    assert {row["text"] for row in rows if row["role"] == "trigger"} == {"zwx", "sks cat", "blue vase"}


def test_a_kohya_folder_that_is_named_itself_gives_its_repeats_and_its_subject(tmp_path):
    folder = tmp_path / "img" / "10_sks cat"
    folder.mkdir(parents=True)
    said = new_project(tmp_path / "none", {"images": str(folder), "family": "tiny"})
    assert "holds no images" in said[1]
    draw(folder / "a.png", seed=0, size=(64, 64))
    said = new_project(tmp_path / "new", {"images": str(folder), "family": "tiny"})
    assert "  10_sks cat: 1 picture, 10 repeats, trigger 'sks cat'" in said
    build(tmp_path / "new", "images", "captions")
    project = Project(tmp_path / "new")
    assert project.config.sections["captions"].trigger == "sks cat"
    assert [row["repeats"] for row in project.current("images").rows().to_pylist()] == [10]
    new_project(tmp_path / "other", {"images": str(folder), "family": "tiny", "trigger": 'z"x'})
    assert Project(tmp_path / "other").config.sections["captions"].trigger == 'z"x'


def test_a_folder_of_code_becomes_a_project_that_can_be_indexed(tmp_path):
    write(tmp_path / "code")
    words = ["init", str(tmp_path / "mine"), "--pipeline", "retrieval", "--code", str(tmp_path / "code")]
    done = CliRunner().invoke(cli, [*words, "--family", "tiny"])
    assert done.exit_code == 0 and f"make index PROJECT={tmp_path / 'mine'}" in done.output
    project = Project(tmp_path / "mine")
    assert project.config.sections["sources"].roots == ("../code",) and project.family.name == "tiny"
    run(project.path, "sources", "units")
    assert project.folder("units").rows().num_rows > 0
    # What stands behind a "#" is valid too.
    file = project.path / "project.toml"
    before, _, after = file.read_text().partition("# [train]")
    file.write_text(f"{before}[train]{after.replace(chr(10) + '# ', chr(10))}")
    assert Project(project.path).config.sections["train"].steps == 40
    with pytest.raises(ValueError, match=r"family must be one of retriever-micro, .*, got 'tinny'; did you mean tiny"):
        new_project(tmp_path / "other", {"code": str(tmp_path / "code"), "family": "tinny"}, "retrieval")
