"""The rules of the house: names, and the order in which make runs the stages."""

from __future__ import annotations

import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

import stages
from pipeline.commands import own
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


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: p.name)
def test_what_a_pipeline_refers_to_by_text_exists(pipeline: Pipeline):
    mine = own(pipeline.name)
    references = [*mine.commands.values(), *mine.methods.values(), mine.template, mine.unused, mine.probes]
    references += [pipeline.families, pipeline.follow]
    for reference in filter(None, references):
        module, _, attribute = reference.partition(":")
        assert hasattr(import_module(module), attribute), reference


# The chain


def makefile_edges() -> dict[str, set[str]]:
    """Target -> the targets that it depends on."""
    edges: dict[str, set[str]] = {}
    for line in (ROOT / "Makefile").read_text().splitlines():
        found = re.match(r"^([a-z]+):(?!=)\s*([a-z ./]*)$", line)
        if found:
            edges.setdefault(found[1], set()).update(found[2].split())
    return edges


def reachable(edges: dict[str, set[str]], target: str) -> set[str]:
    """Directly or not."""
    seen: set[str] = set()
    todo = list(edges[target])
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += edges.get(name, ())
    return seen


@pytest.mark.parametrize(("pipeline", "name"), EVERY_STAGE)
def test_make_runs_every_stage_that_the_pipeline_puts_before_a_stage(pipeline: Pipeline, name):
    assert set(pipeline.upstream(name)) <= reachable(makefile_edges(), name)


@pytest.mark.parametrize(("pipeline", "name"), EVERY_STAGE)
def test_a_stage_reads_only_what_an_earlier_stage_writes(pipeline: Pipeline, name):
    names = list(pipeline.stages)
    assert {read.name for read in pipeline.stage(name).reads} <= set(names[: names.index(name)])


@pytest.mark.parametrize(("pipeline", "name"), EVERY_STAGE)
def test_a_schema_describes_every_column_and_avoids_types_that_duckdb_cannot_read(pipeline: Pipeline, name):
    schema: TableSchema = pipeline.stage(name).writes
    assert schema.doc and set(schema.key) <= {f.name for f in schema.columns}
    for field in schema.stored:
        assert field.metadata[b"doc"], f"{name}.{field.name}"
        assert not re.search(r"halffloat|large_|uint|dictionary|struct", str(field.type)), f"{name}.{field.name}: {field.type}"
