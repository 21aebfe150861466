"""The import contracts of pyproject.toml hold, and each of them notices an import that breaks it."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import stages

ROOT = Path(__file__).parents[1]
PACKAGES = ("schemas", "stages", "pipeline", "data", "tests")
LINTER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
NAMES = [contract["name"] for contract in LINTER["contracts"]]
BREAKS = {  # contract -> a module and an import in it that the contract forbids
    "Imports go one way: tests > data > pipeline > stages > schemas": ("schemas/table.py", "import stages.settings"),
    "No circle anywhere": ("pipeline/store/disk.py", "import pipeline.store.table"),
    "Pipelines never import each other": ("stages/text_to_image/buckets.py", "import tests.toy.lines"),
    "Stages of a pipeline never import each other": ("stages/text_to_image/buckets.py", "import stages.text_to_image.embeddings"),
    "Inside the stages: pipelines > models and tuner, which do not know each other > settings and contracts": (
        "stages/tuner/draws.py",
        "import stages.models.attention",
    ),
    "Models know no stage and no schema": ("stages/models/weights.py", "import schemas.table"),
    "Stages and commands reach an architecture through the record of its family": (
        "stages/text_to_image/samples/stage.py",
        "import stages.models.flux2.sampling",
    ),
    "The tuner knows no stage and no table": ("stages/tuner/draws.py", "import stages.stage"),
    "Inside the pipeline: commands > project > store": ("pipeline/project/config.py", "import pipeline.runner"),
    "Commands of every pipeline import none of one pipeline, and those of one import none of another": (
        "pipeline/commands/plan.py",
        "import pipeline.commands.text_to_image.export",
    ),
    "Of the pipeline package, only a pipeline's own commands import its stages": (
        "pipeline/commands/plan.py",
        "import stages.text_to_image.buckets",
    ),
    "The store knows no stage": ("pipeline/store/disk.py", "import stages.settings"),
    "Inside the store: table > repair > shards > checksums > lock > disk": (
        "pipeline/store/lock.py",
        "import pipeline.store.rows",
    ),
}


def lint(folder: Path) -> str:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    return " ".join((done.stdout + done.stderr).split())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contracts")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=lambda where, names: _not_code(Path(where), names))
    return folder


def _not_code(where: Path, names: list[str]) -> set[str]:
    return {
        name for name in names if (not name.endswith(".py") and not (where / name).is_dir()) or name in ("tables", "__pycache__")
    }


def test_every_contract_has_a_way_to_break_it():
    assert list(BREAKS) == NAMES


def test_the_contracts_hold(source):
    assert f"{len(NAMES)} kept, 0 broken" in lint(source)


@pytest.mark.parametrize("name", NAMES)
def test_an_import_against_a_contract_breaks_it(name, source, tmp_path):
    shutil.copytree(source, tmp_path / "copy")
    path, line = BREAKS[name]
    file = tmp_path / "copy" / path
    file.write_text(f"{file.read_text()}\n\n{line}\n")
    assert f"{name} BROKEN" in lint(tmp_path / "copy")


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
