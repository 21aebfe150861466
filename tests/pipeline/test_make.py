"""What is typed after `make` reaches the command as it was typed."""

import os
import re
import subprocess

import pytest

from pipeline.options import split_overrides
from pipeline.project.paths import CHECKOUT, shell_path
from tests import projects

# Below `make test`, an inner make would print "Entering directory" and take over the options of the outer one.
VARIABLES = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in the checkout, without the variables that an outer make passes on."""
    return subprocess.run(words, cwd=projects.ROOT, env=VARIABLES, capture_output=True, text=True, timeout=600, check=False)


def through_make(target: str, name: str, variable: str, value: str) -> str:
    """Run make with `variable=value` and return the environment variable `name` as the command sees it. Nothing is installed."""
    words = ["make", "-s", "-o", ".venv/ready", target, f"LATENTMILL=printenv {name} #", f"{variable}={value}"]
    done = run(words)
    assert done.returncode == 0, done.stderr
    return done.stdout.removesuffix("\n")


@pytest.mark.parametrize(
    ("target", "variable", "value"),
    [
        ("query", "SQL", "select '$x', $$a$$, \"b\" from t where c like '%`d`' -- $(shell echo no)\n;"),
        ("follow", "WHAT", 'it\'s a $5 "cat" & a dog.jpg'),
        ("panel", "NAME", "loss"),
        ("export", "RUN", "fast"),
        ("compare", "RUNS", "slow fast"),
        ("status", "PROJECT", "data/my cats é $HOME 'q'"),
        ("status", "SET", 'buckets.resolutions=[64, 96] captions.template={trigger}, "$x"'),
    ],
)
def test_quotes_dollars_and_spaces_survive_make(target, variable, value):
    assert through_make(target, f"LATENTMILL_{variable}", variable, value) == value


def test_make_init_passes_every_option_on():
    given = {"IMAGES": "~/my cats", "FAMILY": "micro", "TRIGGER": "ohwx's $cat", "PRESET": "style"}
    for name, value in given.items():
        words = ["make", "-s", "-o", ".venv/ready", "init", f"LATENTMILL=printenv LATENTMILL_{name} #", "PROJECT=cats"]
        assert run([*words, *(f"{each}={text}" for each, text in given.items())]).stdout == f"{value}\n"


def test_make_train_checks_captions_before_weights_are_needed():
    words = ["make", "-n", "-o", ".venv/ready", "train"]
    said = run(words).stdout
    assert re.findall(r"run (\w+)", said)[:5] == ["images", "captions", "checks", "buckets", "latents"]


@pytest.mark.parametrize(("more", "trained"), [("[train]\nsteps = 2\n", True), ("[train.ema]\n", True), ("", False)])
def test_make_index_tunes_the_encoder_first_if_the_project_has_a_section_train(tmp_path, more, trained):
    (tmp_path / "project.toml").write_text(f'[project]\npipeline = "retrieval"\n{more}')
    said = run(["make", "-n", "-o", ".venv/ready", "index", f"PROJECT={tmp_path}"]).stdout
    stages = re.findall(r"run (\w+)", said)
    before = ["sources", "units", "pairs", "tokens"]
    after = ["vectors", "index", "ranks"]
    assert [name for name in stages if name not in ("negatives", "train")] == before + after
    assert ("train" in stages[: stages.index("vectors")]) == trained


def test_set_holds_several_settings_whose_values_may_hold_spaces():
    assert split_overrides("") == split_overrides("  ") == ()
    text = "train.steps=4  buckets.resolutions=[64, 96] captions.template={caption} = a, b\ntrain.noise.mean = 1"
    assert split_overrides(text) == (
        "train.steps=4",
        "buckets.resolutions=[64, 96]",
        "captions.template={caption} = a, b",
        "train.noise.mean = 1",
    )


def test_a_projects_folder_is_written_so_that_make_finds_it(tmp_path, monkeypatch):
    monkeypatch.chdir(CHECKOUT)
    assert shell_path(CHECKOUT / "data" / "cats") == str(CHECKOUT / "data" / "cats")
    assert shell_path(type(CHECKOUT)("data/my cats")) == "'data/my cats'"
    monkeypatch.chdir(tmp_path)
    assert shell_path(type(CHECKOUT)(".")) == str(tmp_path.resolve())


@pytest.mark.parametrize("sql", re.findall(r"```sql\n(.*?)\n```", (projects.ROOT / "README.md").read_text(), re.DOTALL))
def test_sql_of_the_readme_may_be_pasted_between_double_quotes(sql):
    line = f'make -s -o .venv/ready query "LATENTMILL=printenv LATENTMILL_SQL #" SQL="{sql}"'
    done = run(["sh", "-c", line])
    assert done.stdout.removesuffix("\n") == sql


@pytest.mark.parametrize("wrong", ["PROJET=data/cats", "project=data/cats", "STEPS=3"])
def test_a_misspelt_variable_is_refused_and_nothing_runs(wrong):
    words = ["make", "-n", "-o", ".venv/ready", "train", wrong]
    done = run(words)
    assert done.returncode and not done.stdout
    assert f"make has no variable {wrong.partition('=')[0]}; there are PROJECT" in done.stderr


@pytest.mark.parametrize(
    ("given", "missing"), [((), "PROJECT and IMAGES"), (("PROJECT=/tmp/x",), "IMAGES, the folder of images")]
)
def test_make_init_asks_for_what_is_missing_by_the_names_that_make_has_for_it(given, missing):
    done = run(["make", "-o", ".venv/ready", "init", *given])
    assert done.returncode and f"make init needs {missing}, such as: make init PROJECT=" in done.stderr


def test_make_knows_every_variable_that_its_file_reads():
    text = (projects.ROOT / "Makefile").read_text()
    known = re.findall(r"^VARIABLES = (.*)$", text, re.MULTILINE)[0].split()
    read = set(re.findall(r"\$\((?:value )?([A-Z]+)\)", text)) | set(re.findall(r"\$\(if \$\(([A-Z]+)\)", text))
    assert read - {"VARIABLES", "UNKNOWN", "RUN", "PIPELINE", "TRAINS", "PYTEST", "MAKEFILE"} <= set(known)


def test_make_runs_no_command_inside_a_query(tmp_path):
    text = f"$(shell touch {tmp_path}/done)"
    assert through_make("query", "LATENTMILL_SQL", "SQL", text) == text
    assert not (tmp_path / "done").exists()
