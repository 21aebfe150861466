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
    `comments` are the types of comments. `inside` are the types of further nodes that contain functions, such as
    namespaces. These nodes are not returned as units.

    The name of a node in `inside` comes first in the qualified names of its functions. For example, a function `f` in a
    namespace `a` has the qualified name "a.f". A class without a body is not found.
    """

    module: str
    functions: frozenset[str]
    classes: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()
    function: str = "language"
    comments: frozenset[str] = field(default=frozenset({"comment", "line_comment", "block_comment"}))


def _grammar(module: str, functions: str, classes: str = "", inside: str = "", function: str = "language") -> Grammar:
    return Grammar(module, frozenset(functions.split()), frozenset(classes.split()), frozenset(inside.split()), function)


SCRIPT = ("function_declaration generator_function_declaration method_definition", "class_declaration")
TYPED = (SCRIPT[0], "class_declaration abstract_class_declaration interface_declaration")
GRAMMARS = {
    "rust": _grammar("tree_sitter_rust", "function_item", "struct_item enum_item trait_item", "impl_item mod_item"),
    "go": _grammar("tree_sitter_go", "function_declaration method_declaration", "type_declaration"),
    "java": _grammar(
        "tree_sitter_java",
        "method_declaration constructor_declaration",
        "class_declaration interface_declaration enum_declaration record_declaration",
    ),
    "javascript": _grammar("tree_sitter_javascript", *SCRIPT),
    "typescript": _grammar("tree_sitter_typescript", *TYPED, function="language_typescript"),
    "tsx": _grammar("tree_sitter_typescript", *TYPED, function="language_tsx"),
    "c": _grammar("tree_sitter_c", "function_definition", "struct_specifier"),
    "cpp": _grammar("tree_sitter_cpp", "function_definition", "class_specifier struct_specifier", "namespace_definition"),
}
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
    parser = sitter.Parser(sitter.Language(getattr(module, grammar.function)()))
    tree = parser.parse(text.encode())
    try:
        return list(_units(tree.root_node, "", grammar, classes))
    except RecursionError:  # expressions that are nested a thousand deep are written by programs
        return None


def _units(node: Any, owner: str, grammar: Grammar, classes: bool) -> Iterator[Unit]:
    for child in node.named_children:
        if child.type in grammar.functions:
            yield _unit(child, owner, "method" if owner else "function", grammar)
            continue
        name = _name(child) if child.type in grammar.classes | grammar.inside else ""
        if child.type in grammar.classes and name and classes and _block(child):
            yield _unit(child, owner, "class", grammar)
        yield from _units(child, f"{owner}{name}." if name else owner, grammar, classes)


def _unit(node: Any, owner: str, kind: str, grammar: Grammar) -> Unit:
    text = node.text.decode(errors="replace")
    name, block = _name(node), _block(node)
    head = node.text[: block.start_byte - node.start_byte].decode(errors="replace") if block else text
    body = textwrap.dedent(text[len(head) :]).strip("{} \n")
    signature = " ".join(head.split())
    place = head.find(name) + len(name) if name else 0
    code = [line for line in body.splitlines() if line.strip(" {}") and not line.strip().startswith(("//", "/*", "*"))]
    return Unit(
        name=name,
        qualified_name=f"{owner}{name}",
        kind=kind,
        first_line=node.start_point[0] + 1,
        last_line=node.end_point[0] + 1,
        signature=signature,
        docstring=_comment_before(node, grammar),
        body=body,
        rest=text[place:],
        code_lines=len(code),
    )


def _block(node: Any) -> Any:
    """Return the tree-sitter node of the body of a function or class, or None if there is none. `node` is the
    tree-sitter node of the function or class. If `node` has no body itself, its descendants are searched.
    """
    found = node.child_by_field_name("body")
    return found or next((each for each in map(_block, node.named_children) if each), None) if node.type != "block" else None


def _name(node: Any) -> str:
    """Return the name that a syntax node declares, or "" if it has none. For a Rust `impl` block, it is the name of the
    type. For a C function, it is the name inside the declarator, such as `f` in `*f(int x)`.
    """
    for part in ("name", "type", "declarator"):
        found = node.child_by_field_name(part)
        if found is not None and part != "type":
            return _name(found) if part == "declarator" and found.child_by_field_name("declarator") else _last(found)
        if found is not None and node.type == "impl_item":
            return _last(found)
    deeper = [child for child in node.named_children if child.type.endswith("_spec")]
    return _name(deeper[0]) if deeper else ""


def _last(node: Any) -> str:
    words = re.findall(r"\w+", node.text.decode(errors="replace"))
    return words[0] if node.type == "generic_type" and words else ".".join(words)


def _comment_before(node: Any, grammar: Grammar) -> str:
    """Return the comment directly before a unit, without comment signs such as `//`. The result is "" if there is no
    comment. `node` is the syntax node of the unit: a function or class. `grammar` says which nodes are comments in its
    language.

    Attributes and decorators may stand between the comment and the unit.
    """
    lines: list[str] = []
    first, place = node.start_point[0], node.prev_named_sibling
    if place is None and node.parent is not None and node.parent.type in ("export_statement", "decorated_definition"):
        place = node.parent.prev_named_sibling
    while place is not None and place.end_point[0] - (place.end_point[1] == 0) >= first - 1:
        if place.type in grammar.comments:
            lines = [*place.text.decode(errors="replace").splitlines(), *lines]
        elif place.type not in ("attribute_item", "decorator"):
            break
        first, place = place.start_point[0], place.prev_named_sibling
    return "\n".join(MARKS.sub("", MARKS.sub("", line)).strip() for line in lines).strip()
