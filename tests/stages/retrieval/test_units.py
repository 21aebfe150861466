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
    found = find_units(source, "python", UnitsConfig(min_lines=0, **settings))
    return {unit.qualified_name: unit for unit in found if unit.kind != "code"}


def test_functions_methods_and_classes_have_their_names_and_lines():
    found = {name: (unit.kind, unit.first_line, unit.last_line) for name, unit in units(SOURCE).items()}
    assert found == {
        "add": ("function", 4, 14),
        "Stack": ("class", 16, 31),
        "Stack.push": ("method", 21, 21),
        "Stack.pop_all": ("method", 23, 27),
        "Stack.Frame": ("class", 29, 32),
        "Stack.Frame.top": ("method", 30, 32),
        "guarded": ("function", 35, 36),
    } | {"Stack": ("class", 16, 32)}


def test_the_document_has_signature_and_body_without_docstring_and_decorators():
    add = units(SOURCE)["add"]
    assert add.signature == "def add(a, b=2, *more):"
    assert add.docstring == "Add numbers.\n\nSlowly."
    assert add.rest == "(a, b=2,\n        *more):\n    # the sum\n    total = a + b\n\n    return total + sum(more)"
    assert add.body == "total = a + b\n\nreturn total + sum(more)"
    assert add.code_lines == 2
    assert units(SOURCE)["Stack.pop_all"].rest.startswith("(self):\n    def inner()")
    assert units(SOURCE)["Stack.push"].rest == "(self, item): return self.append(item)"


def test_a_docstring_that_shares_its_line_with_code_is_removed_too():
    assert "Return the top" not in units(SOURCE)["Stack.Frame.top"].rest
    assert "x = 1" in units(SOURCE)["Stack.Frame.top"].rest


def test_a_class_is_the_signatures_of_its_methods_and_can_be_left_out():
    stack = units(SOURCE)["Stack"]
    assert stack.body == "limit = 3\ndef push(self, item):\nasync def pop_all(self):"
    assert stack.rest.startswith("(list):")
    assert not {"Stack", "Stack.Frame"} & set(units(SOURCE, classes=False))


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


def test_python_that_does_not_parse_is_cut_into_windows_of_lines():
    found = find_units("print 'old'\n" * 10, "python", UnitsConfig(window=4))
    assert [(unit.first_line, unit.last_line) for unit in found] == [(1, 4), (3, 6), (5, 8), (7, 10)]
    assert {unit.kind for unit in found} == {"lines"}


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


@pytest.mark.parametrize("lines", [1, 2, 3, 4, 5, 7, 40])
def test_windows_cover_every_line(lines):
    found = find_units("word\n" * lines, "sql", UnitsConfig(window=4, min_lines=1))
    assert {n for unit in found for n in range(unit.first_line, unit.last_line + 1)} == set(range(1, lines + 1))


def test_short_bodies_are_left_out():
    assert [unit.name for unit in find_units(SOURCE, "python", UnitsConfig(min_lines=2, classes=False))] == [
        "add",
        "pop_all",
        "top",
    ]


def test_rows_carry_module_package_words_and_query(tmp_path):
    folder = make(tmp_path / "project", verbs=1, things=2)
    run(folder, "sources", "units")
    row = next(row for row in rows(folder, "units") if row["name"] == "count_lines")
    assert (row["path"], row["module"], row["package"]) == ("code/deep/lines.py", "deep.lines", "code/deep")
    assert row["query"] == "Count the lines of a list and keep the largest 10."
    assert row["text"].startswith("deep.lines count_lines(values, lines_limit=3):\n    found = []")
    assert row["words"].startswith("count lines deep lines count lines values lines limit 3 found")


def test_only_the_units_of_a_changed_file_are_made_again(tmp_path):
    folder = make(tmp_path / "project")
    run(folder, "sources", "units")
    before = {row["unit_id"]: row for row in rows(folder, "units")}
    file = folder / "code" / "flat" / "words.py"
    file.write_text(file.read_text().replace("found = []", "found = list()"))
    run(folder, "sources", "units")
    after = {row["unit_id"]: row for row in rows(folder, "units")}
    assert len(after) == len(before)
    assert {after[key]["path"] for key in set(after) - set(before)} == {"code/flat/words.py"}
    run(folder, "units", overrides={"units.batch_size": 1})
    assert {row["unit_id"]: row for row in rows(folder, "units")} == after


@pytest.mark.parametrize(
    ("source", "rest"),
    [
        ("def f(x): return x", "(x): return x"),
        ("async def e(x):\n    return x", "(x):\n    return x"),
        ("class c(list):\n    n = 1", "(list):\n    n = 1"),
    ],
)
def test_the_code_after_a_name_of_one_letter_begins_after_the_name(source, rest):
    assert [unit.rest.strip() for unit in units(source, classes=True).values()] == [rest]


def test_a_file_that_was_windows_for_lack_of_a_grammar_is_parsed_once_the_grammar_is_there(tmp_path, monkeypatch):
    folder = make(tmp_path / "project", verbs=1, things=1)
    (folder / "code" / "main.rs").write_text("/// Add one.\nfn add(x: u32) -> u32 {\n    let y = x;\n    y + 1\n}\n")
    installed = syntax.find_spec
    monkeypatch.setattr(syntax, "find_spec", lambda name: None if name == "tree_sitter_rust" else installed(name))
    run(folder, "sources", "units")
    assert kinds(folder) == {"code/main.rs": {"lines"}, "code/flat/words.py": {"function"}}
    monkeypatch.setattr(syntax, "find_spec", installed)
    run(folder, "units")
    assert kinds(folder) == {"code/main.rs": {"function"}, "code/flat/words.py": {"function"}}


def kinds(folder: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in rows(folder, "units"):
        found.setdefault(row["path"], set()).add(row["kind"])
    return found


def test_a_file_that_changed_after_sources_is_one_line(tmp_path):
    folder = make(tmp_path / "project")
    run(folder, "sources")
    (folder / "code" / "flat" / "words.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"words.py has changed since its row in sources was written: run make sources"):
        run(folder, "units")


def test_a_project_without_usable_sources_is_one_line(tmp_path):
    folder = make(tmp_path / "project", verbs=1, things=1)
    (folder / "code" / "flat" / "words.py").write_bytes(b"\xff\xfe")
    run(folder, "sources")
    with pytest.raises(ValueError, match="no source file is used"):
        run(folder, "units")
