"""Find the functions and classes of other languages with tree-sitter."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from stages.retrieval.texts import split_lines
from stages.retrieval.units.unit import Span, Unit, code_units


@dataclass(frozen=True)
class Grammar:
    module: str  # Python package
    functions: frozenset[str]
    classes: frozenset[str] = frozenset()  # found if they have a body
    # Nodes that contain functions and are no unit, such as namespaces. Their name comes first in qualified names.
    inside: frozenset[str] = frozenset()
    # Functions without a name of their own, such as x => x + 1: units if a declaration or an assignment names them.
    values: frozenset[str] = frozenset()
    function: str = "language"  # of the package, which returns the language
    signs: tuple[str, ...] = ("//", "/*", "*")  # what lines of a comment begin with
    comments: frozenset[str] = field(default=frozenset({"comment", "line_comment", "block_comment", "multiline_comment"}))


def _grammar(module: str, functions: str, classes: str = "", inside: str = "", values: str = "", **others: Any) -> Grammar:
    types = [frozenset(text.split()) for text in (functions, classes, inside, values)]
    return Grammar(module, types[0], types[1], types[2], types[3], **others)


FUNCTIONS = "function_declaration generator_function_declaration method_definition"
CLASSES = "class_declaration abstract_class_declaration interface_declaration"
OBJECTS = "variable_declarator pair internal_module module"
VALUES = "arrow_function function_expression generator_function"
SCRIPT = (FUNCTIONS, CLASSES, OBJECTS, VALUES)
GRAMMARS = {
    "rust": _grammar("tree_sitter_rust", "function_item", "struct_item enum_item trait_item", "impl_item mod_item"),
    "go": _grammar("tree_sitter_go", "function_declaration method_declaration", "type_spec"),
    "java": _grammar(
        "tree_sitter_java",
        "method_declaration constructor_declaration",
        "class_declaration interface_declaration enum_declaration record_declaration",
    ),
    "javascript": _grammar("tree_sitter_javascript", *SCRIPT),
    "typescript": _grammar("tree_sitter_typescript", *SCRIPT, function="language_typescript"),
    "tsx": _grammar("tree_sitter_typescript", *SCRIPT, function="language_tsx"),
    "c": _grammar("tree_sitter_c", "function_definition", "struct_specifier"),
    "cpp": _grammar("tree_sitter_cpp", "function_definition", "class_specifier struct_specifier", "namespace_definition"),
    "csharp": _grammar(
        "tree_sitter_c_sharp",
        "method_declaration constructor_declaration destructor_declaration local_function_statement",
        "class_declaration struct_declaration interface_declaration enum_declaration record_declaration",
        "namespace_declaration",
    ),
    "kotlin": _grammar(
        "tree_sitter_kotlin", "function_declaration secondary_constructor", "class_declaration object_declaration"
    ),
    "php": _grammar(
        "tree_sitter_php",
        "function_definition method_declaration",
        "class_declaration interface_declaration trait_declaration enum_declaration",
        values="anonymous_function arrow_function",
        function="language_php",
        signs=("//", "/*", "*", "#"),
    ),
    "ruby": _grammar("tree_sitter_ruby", "method singleton_method", "class", "module", "lambda", signs=("#",)),
    "swift": _grammar(
        "tree_sitter_swift",
        "function_declaration init_declaration deinit_declaration subscript_declaration",
        "class_declaration protocol_declaration",
        values="lambda_literal computed_property",
    ),
}


# The parts of a name. Besides words: `~Stack` and `operator==` of C++, `empty?` of Ruby.
WORDS = re.compile(r"operator\s*[^\s\w:]+|operator\s+\w+|~?[\w$]+[?!]?")
TOKENS = ("default", "deinit", "constructor", "subscript")  # words in place of a name: `export default`, Swift, Kotlin


def name_node(node: Any) -> Any:
    """The type of a Rust `impl`, `f` of the C function `*f(int x)`, or a word of TOKENS; None without a name."""
    if node.type == "impl_item":
        return node.child_by_field_name("type")
    if token := next((child for child in node.children if child.type in TOKENS), None):
        return token
    for part in ("name", "property", "key", "left"):
        if found := node.child_by_field_name(part):
            return found
    found = node.child_by_field_name("declarator")
    return found if found is None else _declared(found)


def _declared(node: Any) -> Any:
    """`f` in `*f(int x)`, `&f(int x)` and `(*f(int x))(int)`."""
    deeper = None if node.type == "operator_cast" else _inner(node)
    return node if deeper is None else _declared(deeper)


def _inner(node: Any) -> Any:
    """The declarator in a declarator, or None."""
    found = node.child_by_field_name("declarator")
    if found is None and node.type in ("parenthesized_declarator", "reference_declarator"):
        found = next(iter(reversed(node.named_children)), None)
    return found


def name_end(named: Any) -> int:
    """Index in the file's bytes."""
    if named.type == "qualified_identifier":
        return name_end(named.child_by_field_name("name"))
    # The node of `operator bool() const` also holds the parameters.
    found = named.child_by_field_name("declarator") if named.type == "operator_cast" else None
    return int(named.end_byte if found is None else found.start_byte)


def name_parts(named: Any) -> list[str]:
    """["Stack", "push"] for `Stack::push` and `Stack<T>::push`. JavaScript's `module` and `exports` are left out."""
    if named is None:
        return []
    if named.type == "qualified_identifier":
        return name_parts(named.child_by_field_name("scope")) + name_parts(named.child_by_field_name("name"))
    if named.type in ("generic_type", "template_type", "template_function"):
        return name_parts(named.child_by_field_name("name") or named.child_by_field_name("type"))
    text = named.text.decode(errors="replace")
    found = WORDS.findall(text.partition("(")[0] if named.type == "operator_cast" else text)
    while len(found) > 1 and found[0] in ("module", "exports"):
        found = found[1:]
    return found or [text.strip()]  # an operator, such as <=> of Ruby


def first_type(node: Any) -> str:
    """With a period: "Stack." for `(s *Stack)`; "" for None."""
    if node is None:
        return ""
    if node.type == "type_identifier":
        return f"{node.text.decode(errors='replace')}."
    return next(filter(None, map(first_type, node.named_children)), "")


# Declarations of one or more names, such as `const f = ..., g = ...`; a unit is one of them.
LISTS = frozenset(
    {"const_declaration", "var_declaration", "expression_statement", "property_declaration"}
)  # of names, without one
DECLARATIONS = frozenset({"lexical_declaration", "variable_declaration", "type_declaration"})
# What may stand around a unit, after its comment.
AROUND = DECLARATIONS | {"export_statement", "expression_statement", "template_declaration", "body_statement"}
BODIES = frozenset({"function_body", "class_body", "enum_class_body", "computed_property", "block"})  # without the field "body"
CASTS = frozenset({"as_expression", "satisfies_expression", "parenthesized_expression"})  # of TypeScript: (x => x) as F
FIELDS = ("value", "right", "computed_value")  # the fields of a declaration that may hold a function
# Macros, which a parser without the preprocessor takes for types and names: of `class API Stack {`, and alone on a line before
# declarations, where `API_NAMESPACE_BEGIN` makes one function of a namespace.
EXPORTS = re.compile(
    rb"(\b(?:class|struct)\s+)((?:[A-Z][A-Z0-9_]+(?:\([^(){};]*\))?\s+)+)(?=[\w:]+(?:<[^<>{};]*>)?\s*(?:final\s*)?(?::(?!:)|\{))"
)
ALONE = re.compile(
    rb"^()([ \t]*[A-Z][A-Z0-9_]+)(?=\s+(?:(?:inline\s+)?namespace|template|class|struct|enum|using|typedef|extern|constexpr)\b"
    rb"|[ \t]*$\s*(?:#|/[/*]|\}|\Z|[A-Z][A-Z0-9_]+\s*$))",
    re.MULTILINE,
)
TAGS = re.compile(r"<(?:see|seealso|paramref|typeparamref)\s+\w+=\"([^\"]*)\"\s*/>|</?\w[^<>]*>")  # the XML in comments of C#
MARKS = re.compile(r"^\s*(/\*\*?|\*/|\*(?!/)|///?!?|//!|#+)|\*/\s*$")  # what begins and ends the lines of a comment


COMMENTS = 500  # comments before a unit, the nearest, that are its docstring


def can_parse(language: str) -> bool:
    grammar = GRAMMARS.get(language)
    return grammar is not None and all(map(find_spec, ("tree_sitter", grammar.module)))


def syntax_units(text: str, language: str, *, classes: bool, window: int = 40) -> list[Unit] | None:
    """Units with the comment before them as docstring; None if it cannot be parsed, or is nested too deeply."""
    if not can_parse(language):
        return None
    grammar = GRAMMARS[language]
    sitter, module = import_module("tree_sitter"), import_module(grammar.module)
    source = text.encode()
    clear = source
    for macros in (EXPORTS, ALONE) if language in ("c", "cpp") else ():  # spaces in their place keep every position
        clear = macros.sub(lambda found: found[1] + re.sub(rb"\S", b" ", found[2]), clear)
    tree = sitter.Parser(sitter.Language(getattr(module, grammar.function)())).parse(clear)
    try:
        found = list(_units(tree.root_node, "", False, source, grammar, classes))
        lines = split_lines(text)
        covered = np.zeros(len(lines) + 2, bool)
        for unit in found:
            covered[unit.first_line : unit.last_line + 1] = True
        spans = list(_code(tree.root_node, covered, grammar))
        return found + list(code_units(lines, spans, window, grammar.signs))
    except RecursionError:  # expressions that are nested a thousand deep are written by programs
        return None


# Nodes outside of functions and classes that are no code of their own, and those that only hold others.
NO_CODE = re.compile(
    r"import|include|package|using|use_declaration|extern_crate|attribute_item|comment|php_tag|hash_bang|^;$|identifier"
)
DECLARES = re.compile(r"declaration|alias")
HOLDS = re.compile(r"^preproc_(if|else|elif)|linkage_specification|namespace|declaration_list|mod_item|^module$|export_statement")


def _code(node: Any, covered: np.ndarray, grammar: Grammar) -> Iterator[Span]:
    """The statements in `node` on lines that no unit covers."""
    for child in node.named_children:
        first, last = child.start_point[0] + 1, child.end_point[0] + (child.end_point[1] > 0)
        last = max(first, last)
        own = covered[first : last + 1]
        if NO_CODE.search(child.type) or child.type in grammar.classes or own.all():
            continue
        if own.any() or (HOLDS.search(child.type) and child.named_children):
            yield from _code(child, covered, grammar)
        else:
            yield first, last, _given(child)


def _given(node: Any) -> list[str]:
    """The names that a declaration gives."""
    inner = node.named_children if node.type in DECLARATIONS or node.type in LISTS else [node]
    found = [named for each in inner if (named := name_node(each)) is not None]
    if not found and DECLARES.search(node.type):
        found = list(filter(None, [_first_identifier(node)]))
    return [".".join(name_parts(named)) for named in found]


def _first_identifier(node: Any) -> Any:
    """Of the declarations of Kotlin and Swift, which have no field for their names."""
    if node.type.endswith("identifier"):
        return node
    return next(filter(None, (_first_identifier(each) for each in node.named_children if each.type != "modifiers")), None)


def _units(node: Any, owner: str, methods: bool, source: bytes, grammar: Grammar, classes: bool) -> Iterator[Unit]:
    """`methods`: functions directly inside `node` are methods. Units inside a function belong to it."""
    for child in node.named_children:
        if (child.type in grammar.functions and not _misread(child)) or _function_value(child, grammar):
            receiver = first_type(child.child_by_field_name("receiver"))  # only Go: func (s *Stack) Push(v int)
            yield _unit(child, owner + receiver, methods or bool(receiver), source, grammar)
            continue
        is_class = child.type in grammar.classes
        name = ".".join(name_parts(name_node(child))) if is_class or child.type in grammar.inside else ""
        if is_class and name and classes and _body(child, grammar):
            yield _unit(child, owner, False, source, grammar)
        below, of_class = (f"{owner}{name}.", is_class or child.type == "impl_item") if name else (owner, methods)
        yield from _units(child, below, of_class, source, grammar, classes)


def _misread(node: Any) -> bool:
    """Whether a function of C or C++ has no parameters: a macro stands before a namespace or a class."""
    found = node.child_by_field_name("declarator")
    while found is not None and found.type not in ("function_declarator", "identifier"):
        found = _inner(found)
    return found is not None and found.type == "identifier"


def _unit(node: Any, owner: str, method: bool, source: bytes, grammar: Grammar) -> Unit:
    named, within = name_node(node), _body(node, grammar)
    parts = name_parts(named)
    whole = node.parent if node.parent.type in DECLARATIONS and len(node.parent.named_children) == 1 else node
    first, end = whole.start_byte, node.end_byte
    start, stop = within or (end, end)
    head, inside = source[first:start].decode(errors="replace"), source[start:stop].decode(errors="replace")
    body = textwrap.dedent(inside).strip("{} \n")
    code = [line for line in body.splitlines() if line.strip(" {}") and not line.strip().startswith(grammar.signs)]
    is_method = method or len(parts) > 1  # of C++ and JavaScript: Stack::push, Stack.prototype.push
    return Unit(
        name=parts[-1] if parts else "",
        qualified_name=owner + ".".join(parts),
        kind="class" if node.type in grammar.classes else "method" if is_method else "function",
        first_line=whole.start_point[0] + 1,
        last_line=node.end_point[0] + 1,
        signature=_signature(head, grammar),
        docstring=_comment_before(node, grammar),
        body=body,
        rest=source[name_end(named) if named else first : end].decode(errors="replace"),
        code_lines=len(code),
    )


def _signature(head: str, grammar: Grammar) -> str:
    signs = tuple(sign for sign in grammar.signs if sign in ("//", "#"))
    return " ".join(word for line in head.splitlines() if not line.lstrip().startswith(signs) for word in line.split())


def _function_value(node: Any, grammar: Grammar) -> Any:
    """The function that a node names: `x => x + 1` of `f = x => x + 1`. One that is only passed on has no name."""
    if node.type in grammar.values:
        return node if node.child_by_field_name("name") is not None else None
    found = next(filter(None, map(node.child_by_field_name, FIELDS)), None)
    while found is not None and found.type in CASTS and found.named_children:
        found = found.named_children[0]
    return found if found is not None and found.type in grammar.values and name_node(node) is not None else None


def _body(node: Any, grammar: Grammar) -> tuple[int, int] | None:
    """First and end index in the file's bytes."""
    if node.type in ("struct_type", "interface_type"):  # of Go: their braces have no node of their own
        inside = next((each for each in node.named_children if each.children and each.children[0].type == "{"), node)
        brace = next((each for each in inside.children if each.type == "{"), None)
        return None if brace is None else (brace.start_byte, node.end_byte)
    own = node.child_by_field_name("body") or next((each for each in node.named_children if each.type in BODIES), None)
    if own is not None:
        return own.start_byte, own.end_byte
    if value := _function_value(node, grammar):  # a closure or computed property of Swift is its own body
        return _body(value, grammar) or (value.start_byte, value.end_byte)
    if node.type == "block":
        return None
    return next(filter(None, (_body(each, grammar) for each in node.named_children)), None)


def _is_jsdoc(node: Any, grammar: Grammar) -> bool:
    """Whether a blank line may stand between a comment and its function; a licence above a file is none of a function."""
    found = "arrow_function" in grammar.values and node.type in grammar.comments and node.text.startswith(b"/**")
    return found and not re.search(rb"copyright|licen[cs]e|@file", node.text, re.IGNORECASE)


def _comment_before(node: Any, grammar: Grammar) -> str:
    """Without its signs. Attributes and decorators may stand between it and the unit."""
    top = node
    while top.parent is not None and top.parent.type in AROUND:
        if top.prev_named_sibling is not None and top.parent.type != "template_declaration":
            break
        top = top.parent
    parts: list[list[str]] = []  # of the comments, the nearest first
    first, place = top.start_point[0], top.prev_named_sibling
    # tree-sitter looks for the sibling before a node from the first on: 100,000 lines of comments took minutes.
    while (
        len(parts) < COMMENTS
        and place is not None
        and place.end_point[0] - (place.end_point[1] == 0) >= first - 1 - _is_jsdoc(place, grammar)
    ):
        if place.type in grammar.comments:
            parts.append(place.text.decode(errors="replace").splitlines())
        elif place.type not in ("attribute_item", "decorator"):
            break
        first, place = place.start_point[0], place.prev_named_sibling
    lines = [line for part in reversed(parts) for line in part]
    if grammar is GRAMMARS["csharp"]:
        lines = [TAGS.sub(lambda found: found[1] or "", line) for line in lines]
    return "\n".join(MARKS.sub("", MARKS.sub("", line)).strip() for line in lines).strip()
