"""Units of Markdown, notebooks and shell scripts."""

from __future__ import annotations

import json

from stages.retrieval.units.stage import UnitsConfig, find_units

MARKDOWN = """Before.

# Birds

Owls.

## Nests ##

```sh
# no heading
```

Swifts
======
Fast.
"""
SHELL = """#!/bin/sh
HOST=example.org

# Copies a folder
# to the host.
backup() {
  if true; then
    scp "$1" "$HOST":
  fi
}

function restore {
  scp "$HOST":"$1" .
  echo done
}
backup "$@"
echo finished
"""


def places(text: str, language: str, **settings: int) -> list[tuple[str, str, int, int]]:
    found = find_units(text, language, UnitsConfig(**settings))
    return [(unit.kind, unit.qualified_name, unit.first_line, unit.last_line) for unit in found]


def test_a_section_of_markdown_is_a_unit_with_the_headings_that_it_stands_below():
    assert places(MARKDOWN, "markdown") == [
        ("section", "lines 1 to 1", 1, 1),
        ("section", "Birds", 3, 5),
        ("section", "Birds / Nests", 7, 11),
        ("section", "Swifts", 13, 15),
    ]
    assert places("# Long\n" + "word\n" * 5, "markdown", window=4) == [("section", "Long", 1, 4), ("section", "Long", 3, 6)]


def test_a_cell_of_a_notebook_is_a_unit_with_its_lines_in_the_file():
    cells = [
        {"cell_type": "markdown", "source": ["# Count\n", "owls and \u00e9"]},
        {"cell_type": "code", "outputs": [], "source": 'nests = open("a")\nprint(nests)'},
        {"cell_type": "raw", "source": ["x"]},
    ]
    text = json.dumps({"cells": cells}, indent=1)
    found = find_units(text, "notebook", UnitsConfig())
    assert [(unit.kind, unit.qualified_name, unit.body) for unit in found] == [
        ("cell", "cell 1", "# Count\nowls and \u00e9"),
        ("cell", "cell 2", 'nests = open("a")\nprint(nests)'),
    ]
    lines = text.split("\n")
    assert "# Count" in lines[found[0].first_line - 1] and "owls" in lines[found[0].last_line - 1]
    assert "nests" in lines[found[1].first_line - 1] and found[1].first_line == found[1].last_line
    assert {kind for kind, *_ in places("{not\njson", "notebook")} == {"lines"}


def test_a_function_of_a_shell_script_is_a_unit_with_the_comment_above_it():
    assert places(SHELL, "bash") == [
        ("function", "backup", 6, 10),
        ("function", "restore", 12, 15),
        ("code", "lines 16 to 17", 16, 17),
    ]
    assert find_units(SHELL, "bash", UnitsConfig())[0].docstring == "Copies a folder\nto the host."
