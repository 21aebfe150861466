"""project.toml: what is refused, and how it is said."""

import re

import pytest

from pipeline.project import config
from pipeline.project.project import Project
from stages.text_to_image import PIPELINE

GOOD = '[project]\nfamily = "tiny"\n'


def load(tmp_path, text: str, *overrides: str) -> config.Config:
    (tmp_path / "project.toml").write_text(text)
    return config.load(tmp_path / "project.toml", overrides)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[buckets]\nresolution = [512]", "[buckets] resolution: no such key; did you mean resolutions?"),
        ("[bucket]\nresolutions = [512]", "[bucket]: no such section; did you mean buckets?"),
        ("[buckets]\nresolutions = 512", "[buckets] resolutions: 512 is a whole number; a list is wanted, like [512]"),
        ("[buckets]\nresolutions = [500]", "500 is not a multiple of 16; 496 or 512 would be"),
        ('[train]\nsteps = "many"', "[train] steps: 'many' is a string; a whole number is wanted"),
        ("[train]\nsteps = true", "[train] steps: True is true or false; a whole number is wanted"),
        ("train = 3", "[train]: 3 is a value; this is a section of its own"),
        ("[train", "not valid TOML"),
        ('[project]\npipeline = "text_to_imag"', "did you mean text_to_image?"),
        ('[project]\npipeline = ["lora"]', "[project] pipeline: ['lora'] is a list; a string is wanted"),
        ("project = 3", "[project]: 3 is a value; this is a section of its own"),
        ("[project]\ncommit_seconds = -1", "commit_seconds: -1.0 is wrong"),
        ("[buckets]\nresolutions = []", "[buckets] resolutions must name"),
        ("[train]\nlr = inf", "[train] lr: inf is no number to go by"),
        ("[train.alpha_for]\n'*' = nan", "[train] alpha_for.*: nan is no number to go by"),
        (
            "[train]\nema = true",
            "[train.ema]: True is a value; this is a section of its own, with lines of its own below [train.ema]",
        ),
        ("[train.optimizer]\nbeta1 = 1", "project.toml [train.optimizer] beta1 = 1.0 is wrong; 0 or more and below 1"),
        ("[train.noise]\nstd = 0", "project.toml [train.noise] std: 0.0 is wrong"),
        ("[train.data]\nrepeat = 3", "[train.data] repeat: no such key; did you mean repeats?"),
        ("[train]\nweight_decay = 0.1", "[train] weight_decay: no such key; it belongs into [train.optimizer]; there are steps"),
        ('[train]\nvariant = "lokr"\nfactor = 0', "[train] factor: 0 is wrong; 1 or more is wanted"),
        ("[train]\nfactor = 4", '[train] factor: variant = "lora" has none; leave it out, or choose variant = "lokr"'),
        ("[train.noise]\nscale = 1", '[train.noise] scale: base = "logit_normal" has none; leave it out'),
        ("[train]\nlearning_rate = 0.1", "[train] learning_rate: no such key; there are steps"),
    ],
)
def test_a_mistake_is_one_line_that_says_where_and_what_would_be_right(tmp_path, text, said):
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        load(tmp_path, text)
    assert "\n" not in str(error.value)


def test_a_missing_file_names_the_command_that_makes_one(tmp_path):
    with pytest.raises(ValueError, match="latentmill init"):
        config.load(tmp_path / "project.toml")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "project.toml").mkdir()
    with pytest.raises(ValueError, match=r"project\.toml cannot be read: Is a directory"):
        config.load(tmp_path / "project.toml")


def test_a_mark_before_the_text_is_passed_over(tmp_path):
    assert load(tmp_path, "\ufeff" + GOOD).project.family == "tiny"


def test_a_home_folder_of_nobody_is_a_folder_that_is_missing(tmp_path):
    load(tmp_path, GOOD)
    made = Project(tmp_path, ["images.folder=~nobody-at-all/cats"])
    assert made.resource("image_folder") == tmp_path / "~nobody-at-all" / "cats"
    with pytest.raises(ValueError, match="no such folder"):
        Project("~nobody-at-all")


def test_a_whole_number_will_do_for_a_number(tmp_path):
    assert load(tmp_path, GOOD + "[train]\nlr = 1").sections["train"].lr == 1.0


def test_an_override_is_parsed_like_the_file(tmp_path):
    made = load(tmp_path, GOOD, "train.steps=7", "buckets.resolutions=[64, 128]", "captions.trigger=sks")
    assert made.sections["train"].steps == 7
    assert made.sections["buckets"].resolutions == (64, 128)
    assert made.sections["captions"].trigger == "sks"


@pytest.mark.parametrize("override", ["steps=7", "train.steps", "train.=3", "train.stepz=7"])
def test_a_wrong_override_is_refused(tmp_path, override):
    with pytest.raises(ValueError):
        load(tmp_path, GOOD, override)


def test_every_setting_says_what_it_is():
    import dataclasses

    def check(kind: type) -> None:
        for field in dataclasses.fields(kind):
            assert field.metadata.get("doc"), f"{kind.__name__}.{field.name} has no doc"
            assert field.metadata.get("kind") in ("setting", "selects", "runtime"), f"{kind.__name__}.{field.name}"
            if dataclasses.is_dataclass(field.default):
                check(type(field.default))

    check(config.ProjectConfig)
    for stage_name in tuple(PIPELINE.stages):
        check(PIPELINE.stage(stage_name).config)
