"""What the import contracts of pyproject.toml must name, and imports that are written as strings."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

import stages

ROOT = Path(__file__).parents[1]
LINTER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]


UPWARDS = {"schemas": ("stages", "pipeline", "data", "tests"), "stages": ("pipeline", "data", "tests")}


@pytest.mark.parametrize("package", UPWARDS)
def test_no_text_names_a_module_of_a_package_above(package):
    name = re.compile(rf"({'|'.join(UPWARDS[package])})\.[\w.]*(:\w*)?")
    for path in sorted((ROOT / package).rglob("*.py")):
        texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        assert not [text for text in texts if isinstance(text, str) and name.fullmatch(text)], path


def test_every_pipeline_is_under_the_contract_that_keeps_pipelines_apart():
    contract = next(each for each in LINTER["contracts"] if each["name"] == "Pipelines never import each other")
    assert {*stages.PIPELINES.values(), "tests.toy"} == set(contract["modules"])


def test_every_stage_is_under_the_contract_that_keeps_stages_apart():
    contract = next(each for each in LINTER["contracts"] if each["name"] == "Stages of a pipeline never import each other")
    assert {module for name in stages.PIPELINES for module in stages.pipeline(name).stages.values()} == set(contract["modules"])
