"""Find the functions and classes of other languages with tree-sitter, which is an extra: pip install "latentmill[languages]"."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from stages.retrieval.units.grammars import GRAMMARS, Grammar
from stages.retrieval.units.names import first_type, name_end, name_node, name_parts
from stages.retrieval.units.unit import Unit

# Declarations of one or more names, such as `const f = ..., g = ...`; a unit is one of them.
DECLARATIONS = frozenset({"lexical_declaration", "variable_declaration", "type_declaration"})
# What may stand around a unit, after its comment.
AROUND = DECLARATIONS | {"export_statement", "expression_statement", "template_declaration", "body_statement"}
BODIES = frozenset({"function_body", "class_body", "enum_class_body", "computed_property", "block"})  # without the field "body"
CASTS = frozenset({"as_expression", "satisfies_expression", "parenthesized_expression"})  # of TypeScript: (x => x) as F
FIELDS = ("value", "right", "computed_value")  # the fields of a declaration that may hold a function
EXPORTS = re.compile(rb"\b((?:class|struct)\s+)([A-Z][A-Z0-9_]+)(?=\s+[\w:]+(?:<[^<>{};]*>)?\s*(?:final\s*)?(?::(?!:)|\{))")
TAGS = re.compile(r"<(?:see|seealso|paramref|typeparamref)\s+\w+=\"([^\"]*)\"\s*/>|</?\w+[^<>]*>")  # the XML in comments of C#
MARKS = re.compile(r"^\s*(/\*\*?|\*/|\*(?!/)|///?!?|//!|#+)|\*/\s*$")  # what begins and ends the lines of a comment


def can_parse(language: str) -> bool:
    """There is a grammar, and its packages are installed."""
    grammar = GRAMMARS.get(language)
    return grammar is not None and all(map(find_spec, ("tree_sitter", grammar.module)))


def syntax_units(text: str, language: str, *, classes: bool) -> list[Unit] | None:
    """Units with the comment before them as docstring; None if it cannot be parsed, or is nested too deeply."""
    if not can_parse(language):
        return None
    grammar = GRAMMARS[language]
    sitter, module = import_module("tree_sitter"), import_module(grammar.module)
    source = text.encode()
    # A macro such as `class API Stack {` would be taken for the class; spaces in its place keep every position.
    clear = EXPORTS.sub(lambda found: found[1] + b" " * len(found[2]), source) if language == "cpp" else source
    tree = sitter.Parser(sitter.Language(getattr(module, grammar.function)())).parse(clear)
    try:
        return list(_units(tree.root_node, "", False, source, grammar, classes))
    except RecursionError:  # expressions that are nested a thousand deep are written by programs
        return None


def _units(node: Any, owner: str, methods: bool, source: bytes, grammar: Grammar, classes: bool) -> Iterator[Unit]:
    """`methods`: functions directly inside `node` are methods. Units inside a function belong to it."""
    for child in node.named_children:
        if child.type in grammar.functions or _function_value(child, grammar):
            receiver = first_type(child.child_by_field_name("receiver"))  # only Go: func (s *Stack) Push(v int)
            yield _unit(child, owner + receiver, methods or bool(receiver), source, grammar)
            continue
        is_class = child.type in grammar.classes
        name = ".".join(name_parts(name_node(child))) if is_class or child.type in grammar.inside else ""
        if is_class and name and classes and _body(child, grammar):
            yield _unit(child, owner, False, source, grammar)
        below, of_class = (f"{owner}{name}.", is_class or child.type == "impl_item") if name else (owner, methods)
        yield from _units(child, below, of_class, source, grammar, classes)


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


def _comment_before(node: Any, grammar: Grammar) -> str:
    """Without its signs. Attributes and decorators may stand between it and the unit."""
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
    if grammar is GRAMMARS["csharp"]:
        lines = [TAGS.sub(lambda found: found[1] or "", line) for line in lines]
    return "\n".join(MARKS.sub("", MARKS.sub("", line)).strip() for line in lines).strip()
