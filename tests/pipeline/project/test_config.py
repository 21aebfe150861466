"""Reading project.toml: what is refused, and with which message."""

import re

import pytest

from pipeline.project import config

GOOD = '[project]\nfamily = "tiny"\n'


def load(tmp_path, text: str, overrides: config.Overrides = ()) -> config.Config:
    (tmp_path / "project.toml").write_text(text)
    return config.load(tmp_path / "project.toml", overrides)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[buckets]\nresolution = [512]", "buckets.resolution is not a setting; did you mean resolutions? (project.toml line 2"),
        ("[bucket]\nresolutions = [512]", "[bucket] is not a section; did you mean buckets? (project.toml line 1)"),
        ("[buckets]\nresolutions = 512", "buckets.resolutions must be a list of whole numbers, such as [512], got 512 (project"),
        ("[buckets]\nresolutions = [500]", "buckets.resolutions must be multiples of 16, such as 496 or 512, got 500"),
        ('[train]\nsteps = "many"', "train.steps must be a whole number or 'auto', got 'many' (project.toml line 2)"),
        ("train = 3", "train must be a section: write its settings below a line [train], got 3"),
        ("[train]\nsteps = = 3", "not valid TOML: Invalid value (at line 2, column 9): steps = = 3"),
        ("[train]\ngradient_checkpointing = true", 'is not a setting; did you mean memory = "blocks"? (project.toml line 2)'),
        ("[train]\nsteps = " + "[" * 100_000 + "]" * 100_000, "project.toml: not valid TOML: it is nested too deeply"),
        (".".join("a" * 20_000) + " = 1", "project.toml: not valid TOML: a line has more than 200 dots"),
        ("[train]\nsteps = " + "9" * 5000, "project.toml: not valid TOML: Exceeds the limit"),
        ("#" * 2_000_000, "project.toml is too large: 2,000,000 bytes, at most 1,000,000 are read"),
        ("[project]\ncommit_seconds = -1", "project.commit_seconds must be >= 0 and <= 86400, got -1.0 (project.toml line 2)"),
        ("[train]\nlr = inf", "train.lr must be a number, got inf"),
        ("[train.alpha_for]\n'*' = nan", "train.alpha_for must be a section of names with numbers, got {'*': nan}"),
        ("[train]\nema = true", "train.ema must be a section: write its settings below a line [train.ema], got True"),
        ("[train]\nweight_decay = 0.1", "train.weight_decay is not a setting; [train.optimizer] has it (project.toml line 2)"),
        ('[train]\nvariant = "lorra"', "train.variant must be 'lora', 'dora' or 'lokr', got 'lorra'"),
        ("[train]\nfactor = 4", 'leave it out, or choose variant = "lokr"'),
        ('# first\n\n[ train . "ema" ] # on\ndecay = 2', "<= 0.9999999, got 2.0 (project.toml line 4)"),
        ("[train]\nema = {decay = 2}", "(project.toml [train.ema])"),  # it has no line of its own
        ("[train]\nsteps = 0\n[captions]\ntemplate = '''\n[train]\nsteps = 1'''", "got 0 (project.toml [train])"),
        ("[[images.folder]]\npath = ''\n[[images.folder]]\npath = 'b'", "(project.toml [images.folder])"),
        ('[project]\npipeline = ".mine"', "must be one of text_to_image, retrieval or a dotted module name, got '.mine'"),
        ("[buckets.more]\na = 1", "buckets.more is not a setting; [buckets] has resolutions"),
    ],
)
def test_a_mistake_is_one_line_with_its_place_and_what_would_be_right(tmp_path, text, said):
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        load(tmp_path, text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("steps=7", "such as --set train.steps=500; did you mean train.steps or samples.steps or drawings.steps?"),
        ("train.steps", "--set train.steps: an override must be section.key=value"),
        ("train.stepz=7", "train.stepz is not a setting; did you mean steps? (--set train.stepz=7)"),
        ("train.ema={decay=2}", "(--set train.ema={decay=2})"),
    ],
)
def test_a_wrong_override_is_one_line_that_names_it(tmp_path, override, said):
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        load(tmp_path, GOOD, [override])
    assert "\n" not in str(error.value)


def test_overrides_are_parsed_like_the_file_or_are_python_values_by_dotted_name(tmp_path):
    text = GOOD + "[train.ema]\n"
    words = ("train.steps=7", "buckets.resolutions=[64, 128]", f"images.folder={tmp_path}", "captions.trigger=sks")
    values = {"train.steps": 7, "buckets.resolutions": (64, 128), "images.folder": tmp_path, "train.ema": None}
    for given in (words, values):
        sections = load(tmp_path, text, given).sections
        assert (sections["train"].steps, sections["buckets"].resolutions) == (7, (64, 128))
        assert sections["images"].folder == str(tmp_path)
        assert (sections["train"].ema is None) == (given is values)
    assert load(tmp_path, text, words).sections["captions"].trigger == "sks"
    for name, said in (("steps", "override 'steps': 7: an override must be 'section.key'"), ("train.lr", "train.lr must be")):
        with pytest.raises(ValueError, match=re.escape(said)):
            load(tmp_path, text, {name: 7 if name == "steps" else "high"})


def test_previews_are_drawn_with_the_bits_of_training_unless_they_have_their_own(tmp_path):
    def bits(text: str) -> tuple[int | None, object]:
        samples = load(tmp_path, GOOD + text).sections["samples"]
        return samples.base_bits, samples.base_bits_for

    assert bits("") == (16, None)
    trained = '[train]\nbase_bits = 4\nbase_bits_for = {"attn.to_out*" = 8}\n'
    assert bits(trained) == (4, {"attn.to_out*": 8})
    assert bits(trained + "[samples]\nbase_bits = 8") == (8, None)
