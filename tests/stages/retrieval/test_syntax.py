"""Functions and classes of other languages, with tree-sitter."""

from __future__ import annotations

import pytest

from stages.retrieval.units.syntax import GRAMMARS, syntax_units
from tests.stages.retrieval.project import kinds

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


NAMED = """
// Read lines.
export const readLines = async (path: string): Promise<string> => {
  return path;
};
const a = 1, b = function (x) { return x };
class Stack { push = (item) => this.items.push(item); }
module.exports.go = function (q) { return q };
Stack.prototype.walk = function (q) { return q };
const routes = { run(x) { return x }, walk: (y) => y };
useEffect(() => { start() });
export const Big = memo(function Inner(p) { return p });
namespace N { export function inner(z) { return z } }
export const cast = ((c) => c) as Cast;
export default (x) => x;
"""


@pytest.mark.parametrize("language", ["javascript", "typescript", "tsx"])
def test_functions_that_javascript_gives_a_name_by_assignment_are_found(language):
    plain = NAMED.replace(": string): Promise<string>", ")").replace("namespace N", "").replace(" as Cast", "")
    source = plain if language == "javascript" else NAMED
    typed = "(path: string): Promise<string>" if language != "javascript" else "(path)"
    assert kinds(source, language) == {
        "function": "readLines, b, go, routes.run, routes.walk, Big.Inner, "
        + ("inner, cast, default" if language == "javascript" else "N.inner, cast, default"),
        "method": "Stack.push, Stack.prototype.walk",
    }
    found = {unit.name: unit for unit in syntax_units(source, language, classes=False) or []}
    assert found["readLines"].docstring == "Read lines."
    assert found["readLines"].signature == f"const readLines = async {typed} =>"
    assert (found["readLines"].first_line, found["readLines"].last_line) == (3, 5)


CPP = """
namespace ns {
int n(int x) { return x; }
struct S { int get() const { return x; } ~S() { drop(); } };
}
void Stack::push(int k) { a -= k; }
bool ns::S<int>::operator==(const S& o) const { return true; }
// Return the larger one.
template <typename T>
T &larger(T a, T b) { return a; }
int (*pick(int a))(int) { return g; }
class TORCH_API Guard final : public Base { bool held() const { return h; } };
S::operator bool() const { return true; }
"""


def test_a_function_of_cpp_is_named_by_its_declarator_and_a_method_by_its_class():
    functions, methods = "ns.n, larger, pick", "ns.S.get, ns.S.~S, Stack.push, ns.S.operator==, Guard.held, S.operator bool"
    assert kinds(CPP, "cpp") == {"function": functions, "method": methods}
    assert kinds(CPP, "cpp", classes=True) == {"function": functions, "method": methods, "class": "ns.S, Guard"}
    (larger,) = (unit for unit in syntax_units(CPP, "cpp", classes=False) or [] if unit.name == "larger")
    assert larger.docstring == "Return the larger one."


def test_macros_before_declarations_hide_no_function_of_cpp_or_c():
    source = """
API_NAMESPACE_BEGIN
namespace inner {
API_EXPORT template <typename T> class API_LOCKABLE API_FOR(x) Stack { void push(T k) { a = k; } };
}
API_NAMESPACE_END
namespace outer { NAMESPACE_BEGIN namespace deep { int f(int x) { return x; } } }
"""
    assert kinds(source, "cpp") == {"method": "inner.Stack.push", "function": "outer.f"}
    source = "API_BEGIN\n\n/* Add. */\nAPI static int f(int x) { return x; }\nBOOL\ng(int y) { return y; }\n"
    assert kinds(source, "c") == {"function": "f, g"}


@pytest.mark.parametrize(
    ("language", "source"),
    [
        ("rust", "pub fn bear_den(n: u32) -> u32 {\n    hibernate\n\npub fn cub(n: u32) -> u32 {\n    n - 1\n}\n"),
        ("go", "package a\n\nfunc Den(n int) int {\n\tbear := n\n\tif bear > 3 {\n\t\treturn hibernate\n"),
        ("c", "int bear( {\n  hibernate(;\nint g(int x) {\n  return x;\n}\n"),
    ],
)
def test_a_function_in_the_middle_of_an_edit_is_not_lost(language, source):
    found = "\n".join(unit.body for unit in syntax_units(source, language, classes=True) or [])
    assert "hibernate" in found and "bear" in found


def test_types_of_go_are_classes_and_functions_with_a_receiver_are_their_methods():
    source = """
// Stack holds numbers.
type Stack struct {
	items []int
}
type (
	// Reader reads.
	Reader interface { Read() }
	Number int
)
func (s *Stack[T]) Push(v int) { s.items = v }
"""
    assert kinds(GO + source, "go", classes=True) == {"function": "Add", "class": "Stack, Reader", "method": "Stack.Push"}
    found = {unit.name: unit for unit in syntax_units(GO + source, "go", classes=True) or []}
    assert (found["Stack"].docstring, found["Reader"].docstring) == ("Stack holds numbers.", "Reader reads.")
    assert (found["Stack"].signature, found["Stack"].body.strip()) == ("type Stack struct", "items []int")
