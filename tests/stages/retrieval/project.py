"""Small projects of the pipeline retrieval, for tests: a folder of Python files with functions of many purposes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.project.project import Project
from stages.retrieval.units.syntax import GRAMMARS, syntax_units
from tests import projects

CONFIG = """
[project]
pipeline = "retrieval"
family = "tiny"
commit_seconds = 0.0

"""
SPLIT = """
[pairs]
split = "unit"
valid = 0.2
test = 0.4
max_leak = 1.0

[tokens]
hard = true

[train]
steps = 3
batch_size = 2
hard_negatives = 1
rank = 2
lr = 1e-3
precision = "float32"
"""
INDEXED = ("sources", "units", "pairs", "tokens", "vectors", "ranks", "index")  # the stages up to an evaluation
VERBS = ("Count", "Sort", "Reverse", "Parse", "Encode", "Merge", "Split", "Compare", "Filter", "Print")
THINGS = ("words", "lines", "paths", "dates", "colours", "headers", "tickets", "invoices")
FUNCTION = '''
def {verb}_{thing}(values, {thing}_limit=3):
    """{title} the {thing} of a list and keep the largest {number}.

    Args:
        values: the {thing}.
    """
    found = []
    for value in values:  # every one of the {thing}
        if value.{verb}() > {number}:
            found.append(({verb}_{thing}.rank, value))
    return sorted(found)[:{thing}_limit]
'''


def write(folder: Path, verbs: int = 4, things: int = 4) -> Path:
    """One module per thing, one function per verb in each."""
    for position, thing in enumerate(THINGS[:things]):
        place = folder / ("deep" if position % 2 else "flat") / f"{thing}.py"
        place.parent.mkdir(parents=True, exist_ok=True)
        parts = [
            FUNCTION.format(verb=verb.lower(), title=verb, thing=thing, number=10 * position + number)
            for number, verb in enumerate(VERBS[:verbs])
        ]
        place.write_text("\n".join(parts))
    return folder


def make(folder: Path, text: str = SPLIT, **size: int) -> Path:
    """`text`: the rest of project.toml."""
    write(folder / "code", **size)
    (folder / "project.toml").write_text(CONFIG + text)
    return folder


def run(folder: Path, *names: str, overrides: dict[str, Any] | None = None) -> list[str]:
    from pipeline import runner

    console = projects.Silent()
    for name in names:
        runner.run(Project(folder, overrides or {}, fetch=True), name, console)
    return console.lines


def rows(folder: Path, name: str, overrides: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    found: pa.Table = Project(folder, overrides or {}).folder(name).rows()
    return list(found.to_pylist())


def kinds(source: str, language: str, classes: bool = False) -> dict[str, str]:
    """Kind -> the qualified names of its units, in the order of the source. The code of each follows its name, and is whole."""
    pytest.importorskip("tree_sitter")
    pytest.importorskip(GRAMMARS[language].module)
    found: dict[str, list[str]] = {}
    for unit in syntax_units(source, language, classes=classes) or []:
        if unit.kind != "code":
            found.setdefault(unit.kind, []).append(unit.qualified_name)
            assert unit.name + unit.rest.splitlines()[0] in source and unit.rest.count("{") == unit.rest.count("}")
    return {kind: ", ".join(each) for kind, each in found.items()}
