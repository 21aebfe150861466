"""What is typed after `make` reaches the command as it was typed."""

import json
import os
import re
import subprocess
import sys

import pytest

from pipeline.options import split_overrides
from stages.bundled import CHECKOUT, shell_path
from tests import projects

# Below `make test`, an inner make would print "Entering directory" and take over the options of the outer one.
VARIABLES = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}


def run(words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = VARIABLES | variables
    return subprocess.run(words, cwd=projects.ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)


WORDS = "import json, sys; print(json.dumps(sys.argv[1:]))"


def through_make(target: str, *given: str) -> list[str]:
    """The words of the one command that make runs for a target, with `given` variables. Nothing is installed."""
    words = ["make", "-s", "-o", ".venv/ready", "-o", ".venv/view", target, f"LATENTMILL={sys.executable} -c '{WORDS}'", *given]
    done = run(words)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("target", "variable", "value"),
    [
        ("query", "SQL", "select '$x', $$a$$, \"b\" from t where c like '%`d`' -- $(shell echo no)\n;"),
        ("query", "SQL", "--json"),
        ("generate", "WHAT", "ohwx's $cat, (red)"),
        ("generate", "SEED", "7"),
        ("view", "PORT", "8766"),
        ("search", "QUERY", "parse a $date; 'or' \"not\""),
        ("panel", "NAME", "loss"),
        ("export", "STYLE", "comfyui"),
        ("best", "RUN", "fast"),
        ("status", "PROJECT", "data/my cats é $HOME 'q'"),
        ("status", "SET", 'buckets.resolutions=[64, 96] captions.template={trigger}, "$x"'),
    ],
)
def test_quotes_dollars_and_spaces_survive_make(target, variable, value):
    assert value in through_make(target, f"{variable}={value}")


IN = ("-p", "data/projects/example")


@pytest.mark.parametrize(
    ("target", "given", "words"),
    [
        ("runs", ("RUN=1a2b", "NAME=fast"), ("runs", *IN, "--name", "fast", "--", "1a2b")),
        ("compare", ("RUNS=slow fast",), ("compare", *IN, "--", "slow", "fast")),
        ("export", ("RUN=1a2b",), ("export", *IN, "--run", "1a2b")),
        ("evaluate", ("RUN=slow",), ("evaluate", *IN, "--run", "slow")),
        ("segments", ("EVERY=5", "SET=train.lr=1"), ("segments", "--every", "5", *IN, "--set", "train.lr=1")),
    ],
)
def test_a_variable_feeds_one_option_of_the_command(target, given, words):
    assert through_make(target, *given) == list(words)


def test_variables_of_the_environment_other_than_the_project_are_not_read():
    words = ["make", "-s", "-o", ".venv/ready", "runs", f"LATENTMILL={sys.executable} -c '{WORDS}'"]
    done = run(words, NAME="host", RUN="x", SET="train.steps=1", PROJECT="cats")
    assert json.loads(done.stdout) == ["runs", "-p", "cats"]


def test_what_make_gives_to_a_command_it_does_not_give_to_the_stages_before_which_check_captions_first():
    for target, option in (("segments", "--every"), ("evaluate", "evaluate"), ("train", "--name")):
        said = run(["make", "-n", "-o", ".venv/ready", target, "NAME=fast"]).stdout
        assert sum(f" {option} " in line for line in said.splitlines()) == 1, said
    assert re.findall(r"run (\w+)", said)[:5] == ["images", "captions", "checks", "buckets", "latents"]


@pytest.mark.parametrize(("more", "trained"), [("[train]\nsteps = 2\n", True), ("[train.ema]\n", True), ("", False)])
def test_make_index_tunes_the_encoder_first_if_the_project_has_a_section_train(tmp_path, more, trained):
    (tmp_path / "project.toml").write_text(f'[project]\npipeline = "retrieval"\n{more}')
    said = run(["make", "-n", "-o", ".venv/ready", "index", f"PROJECT={tmp_path}"]).stdout
    stages = re.findall(r"run (\w+)", said)
    before = ["sources", "units", "pairs", "tokens"]
    after = ["vectors", "ranks", "index"]
    assert [name for name in stages if name not in ("negatives", "train")] == before + after
    assert ("train" in stages[: stages.index("vectors")]) == trained


def test_set_holds_several_settings_whose_values_may_hold_spaces():
    text = "train.steps=4  buckets.resolutions=[64, 96] captions.template={caption} = a, b\ntrain.noise.mean = 1"
    assert split_overrides([text, "a.b=c d"]) == (
        "train.steps=4",
        "buckets.resolutions=[64, 96]",
        "captions.template={caption} = a, b",
        "train.noise.mean = 1",
        "a.b=c d",
    )


def test_a_setting_after_that_of_set_is_no_argument_of_the_command(tmp_path):
    folder = projects.make(tmp_path / "p", tmp_path, images=1)
    for words in (("--set", "train.steps=1", "train.lr=2"), ("--set=train.steps=1", "train.lr=2")):
        said = projects.latentmill(folder, "export", *words, code=2)
        assert said.endswith("--set takes one word, or several in quotes: --set 'train.steps=1 train.lr=2'\n")


def test_a_projects_folder_is_written_so_that_make_finds_it(tmp_path, monkeypatch):
    monkeypatch.chdir(CHECKOUT)
    assert shell_path(CHECKOUT / "data" / "cats") == str(CHECKOUT / "data" / "cats")
    assert shell_path(type(CHECKOUT)("data/my cats")) == "'data/my cats'"
    monkeypatch.chdir(tmp_path)
    assert shell_path(type(CHECKOUT)(".")) == str(tmp_path.resolve())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *(
            (("train", f"{wrong}=data/cats"), f"make has no variable {wrong}; there are PROJECT")
            for wrong in ("PROJET", "project")
        ),
        (("init",), "make init needs PROJECT and IMAGES, such as: make init PROJECT="),
        (("init", "PROJECT=/tmp/x"), "make init needs IMAGES, the folder of images, such as: make init PROJECT="),
    ],
)
def test_a_misspelt_or_missing_variable_is_named_and_nothing_runs(words, said):
    done = run(["make", "-o", ".venv/ready", *words])
    assert done.returncode and not done.stdout and said in done.stderr
