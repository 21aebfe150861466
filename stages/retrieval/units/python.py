"""Find the functions, methods and classes of Python source with the module `ast` of the running Python."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator

from stages.retrieval.units.unit import Unit

Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = (ast.If, ast.Try, ast.With)  # statements whose definitions belong to the module or class around them


def parse(source: str) -> ast.Module | None:
    """None if the running Python cannot parse it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the user's code are not ours to report
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def python_units(source: str, tree: ast.Module, *, classes: bool) -> Iterator[Unit]:
    """A function inside a function belongs to the outer one. A class is its statements and the signatures of its methods."""
    yield from _inside(tree, "", re.split(r"\r\n|\r|\n", source), classes)  # the line ends that `ast` knows


def _inside(node: ast.AST, owner: str, lines: list[str], classes: bool) -> Iterator[Unit]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            if classes:
                yield _class(child, owner, lines)
            yield from _inside(child, f"{owner}{child.name}.", lines, classes)
        elif isinstance(child, Function):
            yield _function(child, owner, lines)
        elif isinstance(child, (*BLOCKS, ast.ExceptHandler)):
            yield from _inside(child, owner, lines, classes)


def _function(node: Function, owner: str, lines: list[str]) -> Unit:
    statements = _without_docstring(node)
    signature, opened = _signature(node, lines)
    kept = _source(node, statements, lines)
    return Unit(
        name=node.name,
        qualified_name=f"{owner}{node.name}",
        kind="method" if owner else "function",
        first_line=_first_line(node),
        last_line=node.end_lineno or node.lineno,
        signature=signature,
        docstring=ast.get_docstring(node) or "",
        body=_body(statements, lines),
        rest=kept[opened:],
        code_lines=_code_lines(statements, lines),
    )


def _class(node: ast.ClassDef, owner: str, lines: list[str]) -> Unit:
    signature, opened = _signature(node, lines)
    parts = []
    for statement in _without_docstring(node):
        if isinstance(statement, Function):
            parts.append(_signature(statement, lines)[0])
        elif not isinstance(statement, ast.ClassDef):
            parts.append(_lines(statement.lineno, statement.end_lineno or statement.lineno, lines))
    body = "\n".join(parts)
    return Unit(
        name=node.name,
        qualified_name=f"{owner}{node.name}",
        kind="class",
        first_line=_first_line(node),
        last_line=node.end_lineno or node.lineno,
        signature=signature,
        docstring=ast.get_docstring(node) or "",
        body=body,
        rest=f"{signature[opened:]}\n{textwrap.indent(body, '    ')}",
        code_lines=len([line for line in body.splitlines() if line.strip()]),
    )


def _without_docstring(node: Function | ast.ClassDef) -> list[ast.stmt]:
    return node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body


def _first_line(node: Function | ast.ClassDef) -> int:
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def _signature(node: Function | ast.ClassDef, lines: list[str]) -> tuple[str, int]:
    """(the lines up to the body, joined; index of the character after the name)."""
    first = node.body[0]
    last = max(node.lineno, _first_line(first) - 1 if isinstance(first, (Function, ast.ClassDef)) else first.lineno - 1)
    code = " ".join(line.strip() for line in lines[node.lineno - 1 : last])
    if first.lineno == node.lineno:  # the body stands on the line of the signature
        # `ast` counts columns in bytes of UTF-8.
        code = lines[node.lineno - 1].encode()[node.col_offset : first.col_offset].decode(errors="replace").strip()
    name = re.search(r"(?:def|class)\s+\w+", code)
    return code, name.end() if name else 0


def _source(node: Function, statements: list[ast.stmt], lines: list[str]) -> str:
    """From `def` on, dedented, without decorators and docstring."""
    last = node.end_lineno or node.lineno
    kept = lines[node.lineno - 1 : last]
    if len(statements) < len(node.body):
        docstring = node.body[0]
        first, end = docstring.lineno - node.lineno, (docstring.end_lineno or docstring.lineno) - node.lineno
        alone = first > 0 and (not statements or (statements[0].lineno - node.lineno) > end)
        if alone:
            kept = [*kept[:first], *kept[end + 1 :]]
        else:  # the docstring shares a line with code
            kept = [_signature(node, lines)[0], *(ast.unparse(statement) for statement in statements)]
    return textwrap.dedent("\n".join(kept)).rstrip()


def _body(statements: list[ast.stmt], lines: list[str]) -> str:
    if not statements:
        return ""
    last = statements[-1]
    return _lines(_first(statements[0]), last.end_lineno or last.lineno, lines)


def _first(statement: ast.stmt) -> int:
    return _first_line(statement) if isinstance(statement, (Function, ast.ClassDef)) else statement.lineno


def _lines(first: int, last: int, lines: list[str]) -> str:
    return textwrap.dedent("\n".join(lines[first - 1 : last]))


def _code_lines(statements: list[ast.stmt], lines: list[str]) -> int:
    if not statements:
        return 0
    body = lines[_first(statements[0]) - 1 : statements[-1].end_lineno]
    return sum(1 for line in body if line.strip() and not line.strip().startswith("#"))
