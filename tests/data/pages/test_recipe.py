"""The recipe page says what the code does."""

from __future__ import annotations

import dataclasses
import re

import pytest

from data.research.pages.recipe import FILE, GENERATED, PARTS, RIVALS
from data.research.pages.settings import defaults
from pipeline.commands.settings import chosen
from stages.tuner.diffusion import BASES, WEIGHTS
from stages.tuner.optimizers import METHODS, make_optimizer

PAGE = FILE.read_text(encoding="utf-8")


def test_every_generated_part_has_its_place() -> None:
    assert sorted(name for _, name, _ in GENERATED.findall(PAGE)) == sorted(PARTS)


def test_what_is_said_of_other_trainers_names_only_what_exists_here() -> None:
    assert set(RIVALS["same_default"]) <= set(defaults())
    for row in RIVALS["defaults"]:
        names = re.findall(r"\{([\w.]+)\}", row["ours"])
        assert names and set(names) <= set(defaults()), row["name"]
    for kind, method in METHODS.items():
        own = {field.name for field in dataclasses.fields(method)}  # type: ignore[arg-type]
        assert set(RIVALS["optimizer"][kind]) == {"lr"} | own - {"weight_decay"}
    assert {base for names in RIVALS["noise_names"].values() for base in names.values()} <= set(BASES)


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
