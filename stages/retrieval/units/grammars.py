"""The tree-sitter grammars of the languages whose functions and classes are found, and the types of their syntax nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Grammar:
    """A language's grammar and the types of the nodes that matter."""

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
