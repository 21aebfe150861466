"""The recipe page says what the code does."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from data.research.pages.recipe import FILE, RIVALS, render, rivals_table, settings_tables
from data.research.pages.settings import defaults
from pipeline.commands.settings import chosen, in_toml
from pipeline.project import config
from stages.tuner.config import OptimizerConfig
from stages.tuner.diffusion import BASES, WEIGHTS
from stages.tuner.optimizers import METHODS, make_optimizer

PAGE = FILE.read_text(encoding="utf-8")


def test_the_generated_parts_on_disk_are_what_the_code_says() -> None:
    assert render(PAGE) == PAGE, "run: make pages"


def test_every_setting_of_train_has_a_line_with_its_default_and_its_meaning() -> None:
    text = settings_tables()
    for entry in chosen("text_to_image", "train"):
        section = text.split(f"### [{entry.section}]")[1].split("###")[0]
        (line,) = [x for x in section.splitlines() if x.startswith(f"| `{entry.name}` |")]
        assert in_toml(entry.default) in line and entry.doc.replace("|", "\\|") in line


def test_what_is_said_of_other_trainers_names_only_what_exists_here() -> None:
    assert set(RIVALS["same_default"]) <= set(defaults())
    for row in RIVALS["defaults"]:
        names = re.findall(r"\{([\w.]+)\}", row["ours"])
        assert names and set(names) <= set(defaults()), row["name"]
    for kind, method in METHODS.items():
        own = {field.name for field in dataclasses.fields(method)}  # type: ignore[arg-type]
        assert set(RIVALS["optimizer"][kind]) == {"lr"} | own - {"weight_decay"}
    assert {base for names in RIVALS["noise_names"].values() for base in names.values()} <= set(BASES)


def test_every_trainer_has_a_cell_in_every_row_and_ours_is_our_default() -> None:
    columns = len(RIVALS["trainers"]) + 2
    lines = rivals_table().splitlines()
    assert {line.count("|") for line in lines} == {columns + 1}
    cells = {name: ours for name, ours, *_ in ([cell.strip() for cell in line.split("|")[1:]] for line in lines)}
    values = defaults()
    assert cells["learning rate"] == values["train.lr"] and cells["resolutions, px"] == values["buckets.resolutions"]
    assert cells["rank / alpha"] == f"{values['train.rank']} / {values['train.alpha']}"


def test_no_line_of_a_table_has_more_cells_than_its_head() -> None:
    cells = 0
    for line in PAGE.splitlines():
        bare = line.replace("\\|", "").count("|") if line.startswith("|") else 0
        assert not cells or not bare or bare == cells, line
        cells = bare


@pytest.mark.parametrize("kind", METHODS)
def test_every_number_of_an_optimizer_stands_on_the_page_as_a_run_has_it_with_its_source(kind: str) -> None:
    made = OptimizerConfig(kind=kind).method()  # type: ignore[arg-type]
    part = PAGE.split(f"### {kind}\n")[1].split("#")[0]
    rows = re.findall(r"^\| `(\w+)` \| (?:`(.*?)`|unset) \| (.+?) \| (.+?) \|$", part, re.MULTILINE)
    said = {name: tomllib.loads(f"x = {value}")["x"] if value else None for name, value, _, _ in rows}
    assert said == {"lr": made.usual_lr} | dataclasses.asdict(made)  # type: ignore[call-overload]
    for name, _, whose, by in rows:
        assert len(whose) > 3
        assert (name == "lr") == (by == "`[train]`")
        if by == "`[train.optimizer]`":  # and only then
            OptimizerConfig(kind=kind, **{name: said[name]})  # type: ignore[arg-type]
        elif name != "lr":
            assert name not in {field.name for field in dataclasses.fields(OptimizerConfig)}


def test_the_learning_rates_of_lion_and_prodigy_are_the_same_wherever_they_stand() -> None:
    (doc,) = [entry.doc for entry in chosen("text_to_image", "train") if entry.key == "train.lr"]
    rates = [make_optimizer(kind).usual_lr for kind in ("prodigy", "lion")]
    found = re.search(r"prodigy wants (\S+), lion ([^\s;]+)", doc)
    assert found and [float(word) for word in found.groups()] == rates
    (row,) = re.findall(r"^\| lion \| (.*) \|$", PAGE, re.MULTILINE)
    assert re.findall(r"`lr = (\S+)`, a fifth", row) == ["2e-5"]
    assert rates[1] == pytest.approx(make_optimizer("adamw").usual_lr / 5) == float("2e-5")


def test_every_distribution_and_every_weight_is_explained() -> None:
    for name in (*BASES, *WEIGHTS):
        assert f"\n| `{name}` | " in PAGE, name


EXAMPLES = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_is_a_project_file_whose_sections_are_on(example: str, tmp_path: Path) -> None:
    file = tmp_path / "project.toml"
    file.write_text(example)
    sections = config.load(file).sections
    for name in re.findall(r"^\[train\.(\w+)\]", example, re.MULTILINE):
        assert getattr(sections["train"], name) is not None
