"""Functions and classes of other languages, with tree-sitter."""

from __future__ import annotations

import pytest

from stages.retrieval.units.syntax import GRAMMARS, syntax_units

RUST = """
/// Parse a date
/// from text.
#[inline]
pub fn parse_date(text: &str) -> u32 {
    let x = 1;
    x + 2
}

impl Stack<T> {
    // Push an item.
    fn push(&mut self, item: T) { self.items.push(item) }
}
"""
TYPESCRIPT = """
/**
 * Read all lines of a file.
 */
export function readLines(path: string): string[] {
  const text = read(path);
  return text.split("\\n");
}

class Stack {
  /** Push an item. */
  push(item: number) { this.items.push(item); }
}
"""
GO = """
package main

// Add adds two numbers.
func Add(a int, b int) int {
	c := a + b
	return c
}
"""
C = """
/* Count the words. */
static int count_words(const char *text) {
    int n = 0;
    return n;
}
"""


@pytest.mark.parametrize(
    ("language", "source", "expected"),
    [
        ("rust", RUST, {"parse_date": ("Parse a date\nfrom text.", 2), "Stack.push": ("Push an item.", 1)}),
        ("typescript", TYPESCRIPT, {"readLines": ("Read all lines of a file.", 2), "Stack.push": ("Push an item.", 1)}),
        ("go", GO, {"Add": ("Add adds two numbers.", 2)}),
        ("c", C, {"count_words": ("Count the words.", 2)}),
    ],
)
def test_functions_have_name_comment_and_body(language, source, expected):
    pytest.importorskip("tree_sitter")
    pytest.importorskip(GRAMMARS[language].module)
    found = syntax_units(source, language, classes=False)
    assert found is not None
    assert {unit.qualified_name: (unit.docstring, unit.code_lines) for unit in found} == expected
    for unit in found:
        lines = source.splitlines()[unit.first_line - 1 : unit.last_line]
        assert unit.name in lines[0] and unit.rest.startswith(("(", "<"))


def test_a_language_without_a_grammar_is_left_to_windows_of_lines():
    assert syntax_units("select 1", "sql", classes=True) is None
