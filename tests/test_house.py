"""The rules of the house: names, what the import contracts must name, and the order in which make runs the stages."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import stages
from schemas.table import TableSchema
from stages.pipelines import Pipeline

ROOT = Path(__file__).parents[1]
TRACKED = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=False).stdout.split("\n")
PIPELINES = [stages.pipeline(name) for name in stages.PIPELINES]
EVERY_STAGE = [pytest.param(p, name, id=f"{p.name}-{name}") for p in PIPELINES for name in p.stages]


@pytest.mark.skipif(not any(TRACKED), reason="not a git checkout")
def test_a_project_below_data_is_no_new_file_of_the_checkout_and_what_belongs_to_it_is():
    words, paths = (
        ["git", "-C", str(ROOT), "check-ignore", "--no-index", "--stdin"],
        "\n".join(["data/cats/project.toml", *TRACKED]),
    )
    ignored = subprocess.run(words, input=paths, capture_output=True, text=True, check=False).stdout
    assert ignored == "data/cats/project.toml\n"


@pytest.mark.parametrize(("pipeline", "name"), EVERY_STAGE)
def test_make_runs_before_a_stage_all_whose_tables_decide_its_own_and_it_reads_no_others(pipeline: Pipeline, name, tmp_path):
    (tmp_path / "project.toml").write_text(f'[project]\npipeline = "{pipeline.name}"\n[train.slider]\n')
    words = ["make", "-n", "-o", ".venv/ready", name, f"PROJECT={tmp_path}"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]}).stdout
    run = re.findall(r" run (\w+)", said)
    before, names = set(run[: run.index(name)]), list(pipeline.stages)
    reads = {read.name for read in pipeline.stage(name).reads}
    assert reads <= set(pipeline.upstream(name)) <= before & set(names[: names.index(name)])


@pytest.mark.parametrize(("pipeline", "name"), EVERY_STAGE)
def test_a_schema_describes_every_column_and_avoids_types_that_duckdb_cannot_read(pipeline: Pipeline, name):
    schema: TableSchema = pipeline.stage(name).writes
    assert schema.doc and set(schema.key) <= {f.name for f in schema.columns}
    for field in schema.stored:
        assert field.metadata[b"doc"], f"{name}.{field.name}"
        assert not re.search(r"halffloat|large_|uint|dictionary|struct", str(field.type)), f"{name}.{field.name}: {field.type}"


UPWARDS = {"schemas": "stages|pipeline|data|tests", "stages": "pipeline|data|tests"}


@pytest.mark.parametrize("package", UPWARDS)
def test_no_text_names_a_module_of_a_package_above(package):
    name = re.compile(rf"""(["'])({UPWARDS[package]})\.[\w.]*(:\w*)?\1""")
    assert not [path for path in (ROOT / package).rglob("*.py") if name.search(path.read_text())]


def test_every_pipeline_and_every_stage_is_under_the_contract_that_keeps_them_apart():
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    contracts = {each["name"]: set(each.get("modules", ())) for each in linter["contracts"]}
    assert {*stages.PIPELINES.values(), "tests.toy"} == contracts["Pipelines never import each other"]
    every = {module for pipeline in PIPELINES for module in pipeline.stages.values()}
    assert every == contracts["Stages of a pipeline never import each other"]
