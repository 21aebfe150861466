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
    """Return the syntax tree of Python source, or None if the running Python cannot parse it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the user's code are not ours to report
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def python_units(source: str, tree: ast.Module, *, classes: bool) -> Iterator[Unit]:
    """Yield the units of a Python module: pieces of code that a search can find. `source` is the text of the module,
    and `tree` is its syntax tree. Functions and methods are units. A function inside a function belongs to the outer
    one. If `classes` is True, a class is a unit too. It holds the statements of the class and the signatures of its
    methods.
    """
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
    """Return the class `node`, a syntax node, as a `Unit`: a piece of code that a search can find. Its field `body`
    holds the statements of the class, without the docstring. Methods are reduced to their signatures, and nested
    classes are left out. `owner` is the prefix of the qualified name, such as "Outer." or "". `lines` are the lines of
    the file.
    """
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
    """Return `(signature, end)` of a function or class. `signature` is its first lines, up to the body, joined into one
    line. An example is "def f(x: int) -> str:". `end` is the index in `signature` of the character after the name.
    `node` is the syntax node. `lines` are the lines of the file.
    """
    first = node.body[0]
    last = max(node.lineno, _first_line(first) - 1 if isinstance(first, (Function, ast.ClassDef)) else first.lineno - 1)
    code = " ".join(line.strip() for line in lines[node.lineno - 1 : last])
    if first.lineno == node.lineno:  # the body stands on the line of the signature
        code = lines[node.lineno - 1].encode()[node.col_offset : first.col_offset].decode(errors="replace").strip()
    name = re.search(r"(?:def|class)\s+\w+", code)
    return code, name.end() if name else 0


def _source(node: Function, statements: list[ast.stmt], lines: list[str]) -> str:
    """Return the source of the function `node`, a syntax node, without its decorators and its docstring. The source
    begins with `def` or `async def`. Its common indentation is removed. `statements` is the body without the docstring.
    `lines` are the lines of the file.
    """
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
    """Return the number of lines of code in a function body. Empty lines and comment lines are not counted.
    `statements` is the body without the docstring. `lines` are all lines of the file.
    """
    if not statements:
        return 0
    body = lines[_first(statements[0]) - 1 : statements[-1].end_lineno]
    return sum(1 for line in body if line.strip() and not line.strip().startswith("#"))
