"""The laws of the house, over every stage."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import mlx.core as mx
import pytest

from pipeline.project.project import Project
from schemas.table import TableSchema
from stages.text_to_image import PIPELINE
from tests import projects

ROOT = Path(__file__).parents[1]
STAGE_NAMES = tuple(PIPELINE.stages)
SOURCES = sorted(p for folder in ("pipeline", "stages", "schemas") for p in (ROOT / folder).rglob("*.py"))


def makefile_edges() -> dict[str, set[str]]:
    """target -> the targets it depends on, from the Makefile's text."""
    edges: dict[str, set[str]] = {}
    for line in (ROOT / "Makefile").read_text().splitlines():
        found = re.match(r"^([a-z]+):(?!=)\s*([a-z ./]*)$", line)
        if found:
            edges.setdefault(found[1], set()).update(found[2].split())
    return edges


def reachable(edges: dict[str, set[str]], target: str) -> set[str]:
    seen: set[str] = set()
    todo = list(edges[target])
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += edges.get(name, ())
    return seen


@pytest.mark.parametrize("stage_name", STAGE_NAMES)
def test_one_noun_names_schema_stage_section_target_and_test(stage_name):
    stage = PIPELINE.stage(stage_name)
    assert stage.name == stage.writes.name == stage_name
    assert (ROOT / "schemas" / f"{stage_name}.py").exists()
    assert (ROOT / "stages" / f"{stage_name}.py").exists()
    assert (ROOT / "tests" / "stages" / f"test_{stage_name}.py").exists()
    assert stage_name in makefile_edges()
    assert stage.config.__name__ == f"{stage_name.title()}Config"


@pytest.mark.parametrize("stage_name", STAGE_NAMES)
def test_make_runs_what_a_stage_reads_before_it(stage_name):
    edges = makefile_edges()
    for read in PIPELINE.stage(stage_name).reads:
        assert read.name in reachable(edges, stage_name)


@pytest.mark.parametrize("stage_name", STAGE_NAMES)
def test_a_stage_reads_only_what_an_earlier_stage_writes(stage_name):
    earlier = {PIPELINE.stage(n).writes.name for n in STAGE_NAMES[: STAGE_NAMES.index(stage_name)]}
    assert {read.name for read in PIPELINE.stage(stage_name).reads} <= earlier


@pytest.mark.parametrize("stage_name", STAGE_NAMES)
def test_a_schema_describes_every_column_and_avoids_types_that_duckdb_chokes_on(stage_name):
    schema: TableSchema = PIPELINE.stage(stage_name).writes
    assert schema.doc and set(schema.key) <= {f.name for f in schema.columns}
    for field in schema.stored:
        assert field.metadata[b"doc"], f"{stage_name}.{field.name}"
        assert not re.search(r"halffloat|large_|uint|dictionary|struct", str(field.type)), (
            f"{stage_name}.{field.name}: {field.type}"
        )


def test_a_whole_run_gives_back_mlx_memory_stage_by_stage(tmp_path, tiny_weights):
    folder = projects.make(tmp_path / "project", tiny_weights, images=2)
    for stage_name in STAGE_NAMES:
        before = mx.get_active_memory()
        projects.build(folder, stage_name)
        assert mx.get_active_memory() <= before + 4096, stage_name


RUNTIME = (
    "[images]\nworkers = 1\n\n[captions]",
    "[latents]\nbatch_size = 1\nworkers = 1\n\n[embeddings]\nbatch_size = 1\n",
    '[train]\ncheckpoint_every = 3\nmemory = "whole"\nkeep_states = 1\n',
)


def test_rows_do_not_depend_on_runtime_settings(tmp_path, tiny_weights):
    plain = projects.make(tmp_path / "one" / "project", tiny_weights, images=2)
    other = projects.make(tmp_path / "two" / "project", tiny_weights, images=2)
    text = (other / "project.toml").read_text().replace("commit_seconds = 0.0", "commit_seconds = 30.0")
    text = text.replace("checkpoint_every = 2\n", "").replace('checkpoints = "all"', 'checkpoints = "last"')
    for section, changed in zip(("[captions]", "[embeddings]\n", "[train]\n"), RUNTIME, strict=True):
        text = text.replace(section, changed)
    (other / "project.toml").write_text(text)
    projects.edit(plain, 'checkpoints = "all"', 'checkpoints = "last"')
    for stage_name in STAGE_NAMES:
        projects.build(plain, stage_name)
        projects.build(other, stage_name)
        assert Project(plain).recipe(stage_name) == Project(other).recipe(stage_name), stage_name
        clocks = {"inode", "mtime_ns"} & set(projects.content(plain, stage_name).column_names)
        assert projects.content(plain, stage_name).drop_columns(clocks) == projects.content(other, stage_name).drop_columns(
            clocks
        ), stage_name


def test_a_stage_with_nothing_to_do_loads_no_weights(tmp_path, tiny_weights, monkeypatch):
    folder = projects.make(tmp_path / "project", tiny_weights, images=2)
    projects.build(folder)

    def refuse(self, stage, name):
        if name in stage.loads:
            raise AssertionError(f"{stage.name} asked for {name}")
        return real(self, stage, name)

    real = Project._weights
    monkeypatch.setattr(Project, "_weights", refuse)
    assert all(outcome.up_to_date for outcome in projects.build(folder).values())


def test_help_needs_nothing_heavy():
    heavy = ("mlx", "pyarrow", "lance", "duckdb", "transformers", "PIL")
    code = f"import sys; import pipeline.cli; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_source_file_is_short_and_well_named(path):
    assert len(path.read_text().splitlines()) <= 450
    assert path.stem not in ("utils", "common", "helpers", "misc")


def test_every_dependency_is_bounded_on_both_sides():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        name = requirement.split(";")[0]
        assert ">=" in name, requirement
        assert "<" in name, requirement
