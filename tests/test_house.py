"""The rules of the house: rooms, names, words, and the order in which make runs the stages."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import stages
from schemas.table import TableSchema
from stages.pipelines import Pipeline

ROOT = Path(__file__).parents[1]
CODE = ("pipeline", "stages", "schemas")
TRACKED = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=False).stdout.split("\n")
SOURCES = sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py"))
FOLDERS = sorted({path.parent for path in SOURCES} | {ROOT / "data", ROOT / "tests" / "bench"})
PIPELINES = [stages.pipeline(name) for name in stages.PIPELINES]
EVERY_STAGE = [pytest.param(p, name, id=f"{p.name}-{name}") for p in PIPELINES for name in p.stages]

TOP = {"pyproject.toml", "pipeline", "stages", "schemas", "data", "tests", "Makefile", "README.md", "CHANGELOG.md", "LICENSE"}
LONGEST = 320  # lines of a source file
# Private words of earlier versions, and the words that are used instead: see schemas/renames.py for names on disk.
EXEMPT = ("CHANGELOG.md", "data/micro/training/choice.py")  # old words are explained; an emoji is called ghost
PRIVATE_NAMES = (  # of classes in code: followed by a bracket or punctuation, never by a word
    r"\b(Course|Feed|Walk|Stepper|Drawer|Eye|Judge|Fit|Question|Measured|Learnt|Micro|PartReader)\b(?=[([.:,|)\]])"
)
PRIVATE_WORDS = (  # in code and documents
    r"\b(ghost|learnt|lowered|strays?|strayed|drawers?|stepper|untold|foretold|costly|mended|nouns?|hand_over_sooner|write_part)\b",
    r"\bhand(s|ed)? over (sooner|late)\b|\bdear to\b|\b(is|are) heard\b|\bof it MLX\b|\bwhat there is\b|\.keep\(|\.apart\(",
)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


# Rooms


@pytest.mark.skipif(not any(TRACKED), reason="not a git checkout")
def test_the_top_level_holds_the_rooms_and_nothing_else():
    top = {name.split("/")[0] for name in TRACKED if name}
    assert {name for name in top if not name.startswith(".")} == TOP


@pytest.mark.parametrize("folder", FOLDERS, ids=relative)
def test_a_folder_says_in_a_paragraph_what_lives_there(folder):
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    assert len(text.split()) >= 5, f"{relative(folder)}/__init__.py has no paragraph"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_a_source_file_is_short_and_well_named(path):
    assert len(path.read_text().splitlines()) <= LONGEST
    assert path.stem not in ("utils", "common", "helpers", "misc")


@pytest.mark.parametrize(("pipeline", "name"), EVERY_STAGE)
def test_a_stage_its_table_its_section_its_schema_its_target_and_its_tests_have_one_name(pipeline: Pipeline, name):
    stage = pipeline.stage(name)
    assert stage.name == stage.writes.name == name
    assert pipeline.stages[name] == f"stages.{pipeline.name}.{name}"
    assert getattr(import_module(f"schemas.{pipeline.name}.{name}"), name.upper()) is stage.writes
    folder = ROOT / "tests" / "stages" / pipeline.name
    assert (folder / f"test_{name}.py").exists() or any((folder / name).glob("test_*.py"))
    assert name in makefile_edges()
    assert stage.config.__name__ == f"{name.title()}Config"


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: p.name)
def test_what_a_pipeline_refers_to_by_text_exists(pipeline: Pipeline):
    references = [*pipeline.commands.values(), *pipeline.methods.values(), pipeline.families, pipeline.follow]
    for reference in filter(None, references):
        module, _, attribute = reference.partition(":")
        assert hasattr(import_module(module), attribute), reference


# The chain


def makefile_edges() -> dict[str, set[str]]:
    """Target -> the targets that it depends on, from the Makefile's text."""
    edges: dict[str, set[str]] = {}
    for line in (ROOT / "Makefile").read_text().splitlines():
        found = re.match(r"^([a-z]+):(?!=)\s*([a-z ./]*)$", line)
        if found:
            edges.setdefault(found[1], set()).update(found[2].split())
    return edges


def reachable(edges: dict[str, set[str]], target: str) -> set[str]:
    """All targets that `target` depends on, directly or not."""
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


# Words


@pytest.mark.parametrize(
    ("pattern", "suffixes"), [(PRIVATE_NAMES, (".py",)), *((words, (".py", ".md")) for words in PRIVATE_WORDS)]
)
def test_no_private_word_is_left(pattern, suffixes):
    names = [name for name in TRACKED if name.endswith(suffixes) and name not in EXEMPT]
    texts = [ROOT / name for name in names if (ROOT / name).exists()]
    found = [
        f"{relative(path)}:{number}: {line.strip()[:100]}"
        for path in texts
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert not found, "\n".join(found)


# Imports


def test_help_needs_nothing_heavy():
    heavy = ("mlx", "pyarrow", "lance", "duckdb", "transformers", "PIL")
    code = f"import sys; import pipeline.cli; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_every_dependency_is_bounded_on_both_sides():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        name = requirement.split(";")[0]
        assert ">=" in name, requirement
        assert "<" in name, requirement
