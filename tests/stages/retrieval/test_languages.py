"""Functions, classes and comments of Swift, Kotlin, C#, Ruby and PHP, with tree-sitter."""

from __future__ import annotations

import pytest

from stages.retrieval.units.syntax import syntax_units
from tests.stages.retrieval.project import names

SWIFT = """
/// Reads a file.
func read(_ path: String) -> Int {
  return 1
}
struct Stack: View {
  init?(x: Int) { self.x = x }
  /// The view.
  var body: some View { Text("a") }
  @objc func push<T>(_ item: T) where T: C { items.append(item) }
  subscript(i: Int) -> Int { return 1 }
  deinit { close() }
}
let add = { (x: Int) in x + 1 }
"""
KOTLIN = """
/** Reads a file. */
@JvmStatic
fun <T> read(path: String): Int { return 1 }
class Stack(val x: Int) : Base() {
  fun push(item: Int) = items.add(item)
  constructor(y: Int) : this(y) { close() }
}
fun String.last(): Int { return 1 }
"""
CSHARP = """
namespace N.M {
  public class Stack<T> : Base {
    /// <summary>
    /// Reads a file, see <see cref="File"/>.
    /// </summary>
    /// <param name="path">The path.</param>
    [Pure] public int Read(string path) { return 1; }
    int Last() => 1;
  }
}
"""
RUBY = """
# Reads a
# file.
def read(path)
  # comment
  path + 1
end
module M
  class Stack < Base
    # Is it empty?
    def empty?; true; end
    def self.open(x) x end
    private def <=>(other)
      1
    end
  end
end
"""
PHP = """<?php
/**
 * Reads a file.
 */
function read($path) { return 1; }
class Stack extends Base { public function push($item) { return 1; } }
$add = fn($x) => $x + 1;
"""


@pytest.mark.parametrize(
    ("language", "source", "expected", "docstrings"),
    [
        (
            "swift",
            SWIFT,
            {
                "read": ("function", "(_ path: String) -> Int {"),
                "Stack": ("class", ": View {"),
                "Stack.init": ("method", "?(x: Int) { self.x = x }"),
                "Stack.body": ("method", ': some View { Text("a") }'),
                "Stack.push": ("method", "<T>(_ item: T) where T: C { items.append(item) }"),
                "Stack.subscript": ("method", "(i: Int) -> Int { return 1 }"),
                "Stack.deinit": ("method", " { close() }"),
                "add": ("function", " = { (x: Int) in x + 1 }"),
            },
            {"read": "Reads a file.", "Stack.body": "The view."},
        ),
        (
            "kotlin",
            KOTLIN,
            {
                "read": ("function", "(path: String): Int { return 1 }"),
                "Stack": ("class", "(val x: Int) : Base() {"),
                "Stack.push": ("method", "(item: Int) = items.add(item)"),
                "Stack.constructor": ("method", "(y: Int) : this(y) { close() }"),
                "last": ("function", "(): Int { return 1 }"),
            },
            {"read": "Reads a file."},
        ),
        (
            "csharp",
            CSHARP,
            {
                "N.M.Stack": ("class", "<T> : Base {"),
                "N.M.Stack.Read": ("method", "(string path) { return 1; }"),
                "N.M.Stack.Last": ("method", "() => 1;"),
            },
            {"N.M.Stack.Read": "Reads a file, see File.\n\nThe path."},
        ),
        (
            "ruby",
            RUBY,
            {
                "read": ("function", "(path)"),
                "M.Stack": ("class", " < Base"),
                "M.Stack.empty?": ("method", "; true; end"),
                "M.Stack.open": ("method", "(x) x end"),
                "M.Stack.<=>": ("method", "(other)"),
            },
            {"read": "Reads a\nfile.", "M.Stack.empty?": "Is it empty?"},
        ),
        (
            "php",
            PHP,
            {
                "read": ("function", "($path) { return 1; }"),
                "Stack": ("class", " extends Base { public function push($item) { return 1; } }"),
                "Stack.push": ("method", "($item) { return 1; }"),
                "$add": ("function", " = fn($x) => $x + 1"),
            },
            {"read": "Reads a file."},
        ),
    ],
)
def test_each_language_has_its_functions_methods_classes_and_comments(language, source, expected, docstrings):
    assert names(source, language, classes=True) == expected
    found = {unit.qualified_name: unit for unit in syntax_units(source, language, classes=True) or []}
    assert {name: unit.docstring for name, unit in found.items() if unit.docstring} == docstrings
    read = next(unit for unit in found.values() if unit.name.lower() == "read")
    assert "1" in read.body and read.code_lines == 1
    assert "comment" not in read.signature and read.signature.count("\n") == 0
