"""The names of functions and classes in a syntax tree of tree-sitter."""

from __future__ import annotations

import re
from typing import Any

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
    if node.type == "operator_cast":
        return node
    deeper = node.child_by_field_name("declarator")
    if deeper is None and node.type in ("parenthesized_declarator", "reference_declarator"):
        deeper = next(iter(reversed(node.named_children)), None)
    return node if deeper is None else _declared(deeper)


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
