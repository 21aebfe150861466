"""Functions, classes and comments of Swift, Kotlin, C#, Ruby and PHP, with tree-sitter."""

from __future__ import annotations

import pytest

from stages.retrieval.units.syntax import syntax_units
from tests.stages.retrieval.project import kinds

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
                "function": "read, add",
                "class": "Stack",
                "method": "Stack.init, Stack.body, Stack.push, Stack.subscript, Stack.deinit",
            },
            {"read": "Reads a file.", "Stack.body": "The view."},
        ),
        (
            "kotlin",
            KOTLIN,
            {"function": "read, last", "class": "Stack", "method": "Stack.push, Stack.constructor"},
            {"read": "Reads a file."},
        ),
        (
            "csharp",
            CSHARP,
            {"class": "N.M.Stack", "method": "N.M.Stack.Read, N.M.Stack.Last"},
            {"N.M.Stack.Read": "Reads a file, see File.\n\nThe path."},
        ),
        (
            "ruby",
            RUBY,
            {"function": "read", "class": "M.Stack", "method": "M.Stack.empty?, M.Stack.open, M.Stack.<=>"},
            {"read": "Reads a\nfile.", "M.Stack.empty?": "Is it empty?"},
        ),
        ("php", PHP, {"function": "read, $add", "class": "Stack", "method": "Stack.push"}, {"read": "Reads a file."}),
    ],
)
def test_each_language_has_its_functions_methods_classes_and_comments(language, source, expected, docstrings):
    assert kinds(source, language, classes=True) == expected
    found = {unit.qualified_name: unit for unit in syntax_units(source, language, classes=True) or []}
    assert {name: unit.docstring for name, unit in found.items() if unit.docstring} == docstrings
    read = next(unit for unit in found.values() if unit.name.lower() == "read")
    assert "1" in read.body and read.code_lines == 1
    assert "comment" not in read.signature and read.signature.count("\n") == 0


CONSTANTS = {
    "c": "#include <a.h>\n#ifndef A_H\n#define LIMIT 3\ntypedef int nest;\n#endif\nint count(void) {\n  return 1;\n}\n",
    "cpp": "namespace a {\nconst int LIMIT = 3;\nusing nest = int;\nint count() {\n  return 1;\n}\n}\n",
    "go": 'package a\nimport "os"\nconst LIMIT = 3\ntype nest = int\nfunc count() int {\n\treturn 1\n}\n',
    "kotlin": "package a\nimport b.c\nconst val LIMIT = 3\ntypealias nest = Int\nfun count(): Int {\n  return 1\n}\n",
    "rust": "use a::b;\nconst LIMIT: u32 = 3;\ntype nest = u32;\nfn count() -> u32 {\n    1\n}\n",
    "swift": "import A\nlet LIMIT = 3\ntypealias nest = Int\nfunc count() -> Int {\n  return 1\n}\n",
    "typescript": "import a from 'a';\nconst LIMIT = 3;\ntype nest = number;\nfunction count() {\n  return 1;\n}\n",
}


@pytest.mark.parametrize("language", CONSTANTS)
def test_constants_and_type_aliases_are_a_unit_that_no_function_and_no_import_belongs_to(language):
    pytest.importorskip("tree_sitter")
    found = syntax_units(CONSTANTS[language], language, classes=True) or []
    (unit,) = (each for each in found if each.kind == "code")
    assert unit.qualified_name.startswith("LIMIT, nest")
    lines = CONSTANTS[language].splitlines()[unit.first_line - 1 : unit.last_line]
    assert any("nest" in line for line in lines) and not any("import" in line or "return" in line for line in lines)


def test_a_jsdoc_comment_belongs_to_the_function_below_a_blank_line_and_a_licence_does_not():
    pytest.importorskip("tree_sitter_javascript")
    found = syntax_units(
        "/** Copyright 2026. */\n\nfunction a() {}\n\n/**\n * Add one.\n */\n\nfunction b() {}\n", "javascript", classes=True
    )
    assert {unit.name: unit.docstring for unit in found or []} == {"a": "", "b": "Add one."}
