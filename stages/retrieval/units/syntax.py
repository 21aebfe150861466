"""Find the functions and classes of other languages with tree-sitter, which is an extra: pip install "latentmill[languages]"."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from stages.retrieval.units.unit import Unit


@dataclass(frozen=True)
class Grammar:
    """The tree-sitter grammar of a language, for finding functions and classes. `module` is its Python package.
    `function` is the name of the function in this package that returns the language. The other fields are sets of types
    of syntax nodes, such as "class_declaration". `functions` and `classes` are the types of the nodes to find.
    `values` are the types of functions without a name of their own, such as `x => x + 1`. They are found if a
    declaration or an assignment gives them a name. `comments` are the types of comments. `inside` are the types of
    further nodes that contain functions, such as namespaces. These nodes are not returned as units.

    The name of a node in `inside` comes first in the qualified names of its functions. For example, a function `f` in a
    namespace `a` has the qualified name "a.f". A class without a body is not found.
    """

    module: str
    functions: frozenset[str]
    classes: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()
    values: frozenset[str] = frozenset()
    function: str = "language"
    comments: frozenset[str] = field(default=frozenset({"comment", "line_comment", "block_comment"}))


def _grammar(
    module: str, functions: str, classes: str = "", inside: str = "", values: str = "", *, function: str = "language"
) -> Grammar:
    types = {"functions": functions, "classes": classes, "inside": inside, "values": values}
    return Grammar(module, **{name: frozenset(text.split()) for name, text in types.items()}, function=function)


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
}
# Declarations of one or more names, such as `const f = ..., g = ...`; a unit is one of them.
DECLARATIONS = frozenset({"lexical_declaration", "variable_declaration", "type_declaration"})
# What may stand around a unit, after its comment.
AROUND = DECLARATIONS | {"export_statement", "expression_statement", "template_declaration"}
EXPORTS = re.compile(rb"\b((?:class|struct)\s+)([A-Z][A-Z0-9_]+)(?=\s+[\w:]+(?:<[^<>{};]*>)?\s*(?:final\s*)?(?::(?!:)|\{))")
WORDS = re.compile(r"operator\s*[^\s\w:]+|operator\s+\w+|~?[\w$]+")  # the parts of a name, those of C++ too: ~Stack, operator==
MARKS = re.compile(r"^\s*(/\*\*?|\*/|\*(?!/)|///?!?|//!)|\*/\s*$")  # what begins and ends the lines of a comment


def syntax_units(text: str, language: str, *, classes: bool) -> list[Unit] | None:
    """Parse a source text with tree-sitter, and return its functions and methods as a list of `Unit`. Classes are
    included if `classes` is True. A unit's `docstring` is the comment before it. `language` is a key of `GRAMMARS`,
    such as "rust". Returns None if tree-sitter is not installed, if the language is not known, or if the text is nested
    too deeply.
    """
    grammar = GRAMMARS.get(language)
    if grammar is None:
        return None
    try:
        sitter, module = import_module("tree_sitter"), import_module(grammar.module)
    except ImportError:
        return None
    source = text.encode()
    # A macro such as `class API Stack {` would be taken for the class; spaces in its place keep every position.
    clear = EXPORTS.sub(lambda found: found[1] + b" " * len(found[2]), source) if language == "cpp" else source
    tree = sitter.Parser(sitter.Language(getattr(module, grammar.function)())).parse(clear)
    try:
        return list(_units(tree.root_node, "", False, source, grammar, classes))
    except RecursionError:  # expressions that are nested a thousand deep are written by programs
        return None


def _units(node: Any, owner: str, methods: bool, source: bytes, grammar: Grammar, classes: bool) -> Iterator[Unit]:
    """Yield the units inside a syntax node, in order. Units inside a function belong to the function. `owner` is the
    prefix of qualified names, such as "Stack." or "". `methods` is True if functions directly inside `node` are
    methods. `source` is the whole file. `classes` says whether classes are units.
    """
    for child in node.named_children:
        if child.type in grammar.functions or _is_named_value(child, grammar):
            receiver = _first_type(child.child_by_field_name("receiver"))  # only Go: func (s *Stack) Push(v int)
            yield _unit(child, owner + receiver, methods or bool(receiver), source, grammar)
            continue
        is_class = child.type in grammar.classes
        name = ".".join(_parts(_name_node(child))) if is_class or child.type in grammar.inside else ""
        if is_class and name and classes and _body_start(child) is not None:
            yield _unit(child, owner, False, source, grammar)
        below, of_class = (f"{owner}{name}.", is_class or child.type == "impl_item") if name else (owner, methods)
        yield from _units(child, below, of_class, source, grammar, classes)


def _unit(node: Any, owner: str, method: bool, source: bytes, grammar: Grammar) -> Unit:
    named, start = _name_node(node), _body_start(node)
    parts = _parts(named)
    whole = node.parent if node.parent.type in DECLARATIONS and len(node.parent.named_children) == 1 else node
    first, end = whole.start_byte, node.end_byte
    head, tail = (source[part].decode(errors="replace") for part in (slice(first, start or end), slice(start or end, end)))
    body = textwrap.dedent(tail).strip("{} \n")
    code = [line for line in body.splitlines() if line.strip(" {}") and not line.strip().startswith(("//", "/*", "*"))]
    is_method = method or len(parts) > 1  # of C++ and JavaScript: Stack::push, Stack.prototype.push
    return Unit(
        name=parts[-1] if parts else "",
        qualified_name=owner + ".".join(parts),
        kind="class" if node.type in grammar.classes else "method" if is_method else "function",
        first_line=whole.start_point[0] + 1,
        last_line=node.end_point[0] + 1,
        signature=" ".join(head.split()),
        docstring=_comment_before(node, grammar),
        body=body,
        rest=source[_name_end(named) if named else first : end].decode(errors="replace"),
        code_lines=len(code),
    )


def _is_named_value(node: Any, grammar: Grammar) -> bool:
    """Return True if `node` is a function that is a value and has a name: an assignment such as `f = x => x + 1`, or an
    expression such as `function f(x) {}`. A function that is only passed on, as in `g(x => x + 1)`, has no name.
    """
    if node.type in grammar.values:
        return node.child_by_field_name("name") is not None
    value = node.child_by_field_name("value") or node.child_by_field_name("right")
    return value is not None and value.type in grammar.values and _name_node(node) is not None


def _body_start(node: Any) -> int | None:
    """Return where the body of a function or class begins, as an index in the bytes of the file, or None if there is no
    body. `node` is the syntax node of the function or class. If `node` has no body itself, its descendants are searched.
    """
    if node.type in ("struct_type", "interface_type"):  # of Go: their braces have no node of their own
        brace = next((each for each in (node, *node.named_children) if each.children and each.children[0].type == "{"), node)
        found = next((each for each in brace.children if each.type == "{"), None)
    else:
        found = node.child_by_field_name("body")
    if found is not None:
        return int(found.start_byte)
    if node.type == "block":
        return None
    return next((start for start in map(_body_start, node.named_children) if start is not None), None)


def _name_node(node: Any) -> Any:
    """Return the syntax node of the name that `node` declares, or None if it has none. For a Rust `impl` block, it is
    the type. For a C function, it is the name inside the declarator, such as `f` in `*f(int x)`. For a function that
    JavaScript exports without a name, it is the word `default`.
    """
    if node.type == "impl_item":
        return node.child_by_field_name("type")
    for part in ("name", "property", "key", "left"):
        if found := node.child_by_field_name(part):
            return found
    if found := node.child_by_field_name("declarator"):
        return _declared(found)
    return next((child for child in node.children if child.type == "default"), None)


def _declared(node: Any) -> Any:
    """Return the name inside a declarator of C or C++: `f` in `*f(int x)`, `&f(int x)` and `(*f(int x))(int)`."""
    if node.type == "operator_cast":
        return node
    deeper = node.child_by_field_name("declarator")
    if deeper is None and node.type in ("parenthesized_declarator", "reference_declarator"):
        deeper = next(iter(reversed(node.named_children)), None)
    return node if deeper is None else _declared(deeper)


def _name_end(named: Any) -> int:
    """Return where a name ends, as an index in the bytes of the file. `named` is the syntax node of the name. Of the C++
    name `operator bool() const`, the node also holds the parameters, which do not belong to the name.
    """
    if named.type == "qualified_identifier":
        return _name_end(named.child_by_field_name("name"))
    found = named.child_by_field_name("declarator") if named.type == "operator_cast" else None
    return int(named.end_byte if found is None else found.start_byte)


def _parts(named: Any) -> list[str]:
    """Return the parts of a name, such as ["Stack", "push"] for `Stack::push` or `Stack<T>::push`. `named` is the syntax
    node of the name, or None. The prefixes `module` and `exports` of JavaScript are left out.
    """
    if named is None:
        return []
    if named.type == "qualified_identifier":
        return _parts(named.child_by_field_name("scope")) + _parts(named.child_by_field_name("name"))
    if named.type in ("generic_type", "template_type", "template_function"):
        return _parts(named.child_by_field_name("name") or named.child_by_field_name("type"))
    text = named.text.decode(errors="replace")
    found = WORDS.findall(text.partition("(")[0] if named.type == "operator_cast" else text)
    while len(found) > 1 and found[0] in ("module", "exports"):
        found = found[1:]
    return found


def _first_type(node: Any) -> str:
    """Return the first type name inside a syntax node with a period, such as "Stack." for `(s *Stack)`, or "" for None."""
    if node is None:
        return ""
    if node.type == "type_identifier":
        return f"{node.text.decode(errors='replace')}."
    return next(filter(None, map(_first_type, node.named_children)), "")


def _comment_before(node: Any, grammar: Grammar) -> str:
    """Return the comment directly before a unit, without comment signs such as `//`. The result is "" if there is no
    comment. `node` is the syntax node of the unit: a function or class. `grammar` says which nodes are comments in its
    language.

    Attributes and decorators may stand between the comment and the unit.
    """
    top = node
    while top.parent is not None and top.parent.type in AROUND:
        if top.prev_named_sibling is not None and top.parent.type != "template_declaration":
            break
        top = top.parent
    lines: list[str] = []
    first, place = top.start_point[0], top.prev_named_sibling
    while place is not None and place.end_point[0] - (place.end_point[1] == 0) >= first - 1:
        if place.type in grammar.comments:
            lines = [*place.text.decode(errors="replace").splitlines(), *lines]
        elif place.type not in ("attribute_item", "decorator"):
            break
        first, place = place.start_point[0], place.prev_named_sibling
    return "\n".join(MARKS.sub("", MARKS.sub("", line)).strip() for line in lines).strip()
