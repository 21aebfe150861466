"""The stage units: what is cut out of a source file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from stages.retrieval.units import syntax
from stages.retrieval.units.python import python_units
from stages.retrieval.units.stage import UnitsConfig, find_units
from stages.retrieval.units.unit import Unit
from tests.stages.retrieval.project import make, rows, run

SOURCE = '''
import functools

@functools.cache
def add(a, b=2,
        *more):
    """Add numbers.

    Slowly.
    """
    # the sum
    total = a + b

    return total + sum(more)

class Stack(list):
    """A stack."""

    limit = 3

    def push(self, item): return self.append(item)

    async def pop_all(self):
        """Take everything."""
        def inner():
            return 1
        return inner()

    class Frame:
        def top(self):
            """Return the top.""" ; x = 1
            return x

if True:
    def guarded():
        return 1
'''


def units(source: str, **settings: object) -> dict[str, Unit]:
    found = find_units(source, "python", UnitsConfig(**{"min_lines": 0} | settings))
    return {unit.qualified_name: unit for unit in found if unit.kind != "code"}


def test_functions_methods_and_classes_have_names_lines_signatures_and_bodies_without_docstrings_and_decorators():
    found = units(SOURCE)
    assert {name: (unit.kind, unit.first_line, unit.last_line) for name, unit in found.items()} == {
        "add": ("function", 4, 14),
        "Stack": ("class", 16, 32),
        "Stack.push": ("method", 21, 21),
        "Stack.pop_all": ("method", 23, 27),
        "Stack.Frame": ("class", 29, 32),
        "Stack.Frame.top": ("method", 30, 32),
        "guarded": ("function", 35, 36),
    }
    add, stack = found["add"], found["Stack"]
    assert add.signature == "def add(a, b=2, *more):"
    assert add.docstring == "Add numbers.\n\nSlowly."
    assert add.rest == "(a, b=2,\n        *more):\n    # the sum\n    total = a + b\n\n    return total + sum(more)"
    assert add.body == "total = a + b\n\nreturn total + sum(more)"
    assert add.code_lines == 2
    assert found["Stack.pop_all"].rest.startswith("(self):\n    def inner()")
    assert found["Stack.push"].rest == "(self, item): return self.append(item)"
    assert "Return the top" not in found["Stack.Frame.top"].rest and "x = 1" in found["Stack.Frame.top"].rest
    assert stack.body == "limit = 3\ndef push(self, item):\nasync def pop_all(self):"
    assert stack.rest.startswith("(list):")
    assert not {"Stack", "Stack.Frame"} & set(units(SOURCE, classes=False))
    assert set(units(SOURCE, min_lines=2, classes=False)) == {"add", "Stack.pop_all", "Stack.Frame.top"}
    for name, rest in (("def f", "(x): return x"), ("async def e", "(x):\n    return x"), ("class c", "(list):\n    n = 1")):
        assert [unit.rest.strip() for unit in units(name + rest).values()] == [rest], "a name of one letter"


def test_lines_are_counted_as_python_counts_them():
    source = "x = 'a\x0cb'\r\ndef f():\r\n    return '\u2028'\r\ndef g():\r    return 2\n"
    found = units(source)
    assert [(unit.first_line, unit.last_line) for unit in found.values()] == [(2, 3), (4, 5)]
    assert found["g"].body == "return 2"


def test_no_function_of_the_standard_library_keeps_its_docstring():
    import email.message

    source = Path(email.message.__file__).read_text(encoding="utf-8")
    found = python_units(source, classes=False)
    count = sum(isinstance(node, ast.FunctionDef) for node in ast.walk(ast.parse(source)))
    assert len(found) > 0.9 * count
    assert all(unit.docstring.split("\n")[0] not in unit.rest for unit in found if len(unit.docstring) > 20)


ELIFS = "if x == 0:\n    def first(): pass\n" + "".join(f"elif x == {n}:\n    y = {n}\n" for n in range(1200))


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        (f"{ELIFS}else:\n    def last():\n        return 1\n", "python", {"first", "last"}),
        ('def f():\n    """Half \\ud800 of a pair."""\n    return 1\n', "python", {"f"}),
        ("def f():\n    return " + "-" * 3000 + "x\n", "python", None),
        ("f() {\n" * 60_000, "bash", None),
        ("x\nf() {\n}\n" * 30_000, "bash", {"f"}),
        ("//x\n" * 40_000 + "int f() {\n  return 1;\n}\n", "c", {"f"}),
        ("# " + " #" * 60_000 + "x\n", "markdown", {"# " * 59_999 + "#x"}),
        ('{"cells": [' + '{"cell_type": "code", "source": "x\\ny"},\n' * 9000 + "{}]}", "notebook", None),
    ],
    ids=["elifs", "surrogate", "nested", "endless functions", "many functions", "comments", "heading", "cells"],
)
def test_a_hostile_file_gives_units_or_windows_of_lines_in_one_pass(text, language, expected):
    found = find_units(text, language, UnitsConfig(min_lines=0))
    assert found and all(unit.docstring.encode() is not None for unit in found)
    if expected:
        assert expected <= {unit.qualified_name for unit in found}


MODULE = """\"\"\"Counts birds by the nests that they leave.\"\"\"
import os

__all__ = ["count"]
# How often a nest is visited.
VISITS = 3
Nest = dict[str, int]


def count(nests):
    total = 0
    return total + len(nests)


LIMITS: Nest = {
    "owl": 1,
}
if __name__ == "__main__":
    count([])
"""


def test_the_statements_of_a_module_that_define_no_function_are_units_with_the_names_that_they_give():
    found = {unit.qualified_name: unit for unit in find_units(MODULE, "python", UnitsConfig()) if unit.kind == "code"}
    lines = {name: (unit.first_line, unit.last_line) for name, unit in found.items()}
    assert lines == {"lines 1 to 1": (1, 1), "VISITS, Nest": (5, 7), "LIMITS": (15, 17)}
    assert "How often a nest is visited" in found["VISITS, Nest"].rest and found["LIMITS"].name == "LIMITS"


def test_a_file_in_the_middle_of_an_edit_keeps_the_functions_that_parse():
    source = SOURCE.replace("class Stack(list):", "def half(\n    a,\n\nclass Stack(list):").replace(
        "limit = 3", "limit = 3\n    n = 1"
    )
    found = find_units(source, "python", UnitsConfig())
    assert [(unit.qualified_name, unit.first_line) for unit in found if unit.kind != "code"] == [
        ("add", 4),
        ("lines 16 to 17", 16),
        ("Stack", 19),
        ("Stack.pop_all", 27),
        ("Stack.Frame.top", 34),
    ]


@pytest.mark.parametrize("lines", [1, 4, 5, 7, 40])
def test_windows_of_what_does_not_parse_cover_every_line_and_overlap(lines):
    for text, language in (("word\n", "sql"), ("print 'old'\n", "python")):
        found = find_units(text * lines, language, UnitsConfig(window=4, min_lines=1))
        assert {n for unit in found for n in range(unit.first_line, unit.last_line + 1)} == set(range(1, lines + 1))
        places = [(unit.first_line, unit.last_line) for unit in found]
        assert {unit.kind for unit in found} == {"lines"} and (lines != 7 or places == [(1, 4), (3, 6), (5, 7)])


def test_rows_carry_module_package_words_and_query_and_only_those_of_a_changed_file_are_made_again(tmp_path):
    folder = make(tmp_path / "project", verbs=1, things=2)
    run(folder, "sources", "units")
    row = next(row for row in rows(folder, "units") if row["name"] == "count_lines")
    assert (row["path"], row["module"], row["package"]) == ("code/deep/lines.py", "deep.lines", "code/deep")
    assert row["query"] == "Count the lines of a list and keep the largest 10."
    assert row["text"].startswith("deep.lines count_lines(values, lines_limit=3):\n    found = []")
    assert row["words"].startswith("count lines deep lines count lines values lines limit 3 found")
    before = {row["unit_id"] for row in rows(folder, "units")}
    file = folder / "code" / "flat" / "words.py"
    file.write_text(file.read_text().replace("found = []", "found = list()"))
    run(folder, "sources")
    file.write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"words.py has changed since its row in sources was written: run make sources"):
        run(folder, "units")
    file.write_text("def f(values):\n    values += 1\n    return values\n")
    run(folder, "sources", "units")
    after = {row["unit_id"]: row for row in rows(folder, "units")}
    assert len(after) == len(before)
    assert {after[key]["path"] for key in set(after) - before} == {"code/flat/words.py"}
    for each in (file, folder / "code" / "deep" / "lines.py"):
        each.write_bytes(b"\xff\xfe")
    run(folder, "sources")
    with pytest.raises(ValueError, match="no source file is used"):
        run(folder, "units")


def test_a_file_that_was_windows_for_lack_of_a_grammar_is_parsed_once_the_grammar_is_there(tmp_path, monkeypatch):
    folder = make(tmp_path / "project", verbs=1, things=1)
    (folder / "code" / "main.rs").write_text("/// Add one.\nfn add(x: u32) -> u32 {\n    let y = x;\n    y + 1\n}\n")
    installed = syntax.find_spec
    monkeypatch.setattr(syntax, "find_spec", lambda name: None if name == "tree_sitter_rust" else installed(name))
    run(folder, "sources", "units")
    assert {row["kind"] for row in rows(folder, "units") if row["path"] == "code/main.rs"} == {"lines"}
    monkeypatch.setattr(syntax, "find_spec", installed)
    run(folder, "units")
    assert {row["path"]: row["kind"] for row in rows(folder, "units")} == dict.fromkeys(
        ("code/main.rs", "code/flat/words.py"), "function"
    )
