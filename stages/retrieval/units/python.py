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


def python_units(source: str, *, classes: bool) -> list[Unit] | None:
    """An inner function belongs to the outer; a class is its statements and methods' signatures. None if it does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the user's code are not ours to report
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return list(_inside(tree, "", re.split(r"\r\n|\r|\n", source), classes))  # the line ends that `ast` knows


def _inside(node: ast.AST, owner: str, lines: list[str], classes: bool) -> Iterator[Unit]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            if classes:
                yield _unit(child, owner, lines)
            yield from _inside(child, f"{owner}{child.name}.", lines, classes)
        elif isinstance(child, Function):
            yield _unit(child, owner, lines)
        elif isinstance(child, (*BLOCKS, ast.ExceptHandler)):
            yield from _inside(child, owner, lines, classes)


def _unit(node: Function | ast.ClassDef, owner: str, lines: list[str]) -> Unit:
    statements = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    signature, opened = _signature(node, lines)
    if isinstance(node, ast.ClassDef):
        kind, comment = "class", None
        body = "\n".join(
            _signature(each, lines)[0] if isinstance(each, Function) else _dedented(lines, each.lineno, each.end_lineno)
            for each in statements
            if not isinstance(each, ast.ClassDef)
        )
        rest, code = f"{signature[opened:]}\n{textwrap.indent(body, '    ')}", body.splitlines()
    else:
        kind, comment = "method" if owner else "function", "#"
        first, last = (_first_line(statements[0]), statements[-1].end_lineno) if statements else (1, 0)
        body, code = _dedented(lines, first, last), lines[first - 1 : last]
        rest = _source(node, statements, lines)[opened:]
    return Unit(
        name=node.name,
        qualified_name=f"{owner}{node.name}",
        kind=kind,
        first_line=_first_line(node),
        last_line=node.end_lineno or node.lineno,
        signature=signature,
        docstring=ast.get_docstring(node) or "",
        body=body,
        rest=rest,
        code_lines=sum(1 for line in code if line.strip() and not (comment and line.strip().startswith(comment))),
    )


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])


def _dedented(lines: list[str], first: int, last: int | None) -> str:
    return textwrap.dedent("\n".join(lines[first - 1 : last]))


def _signature(node: Function | ast.ClassDef, lines: list[str]) -> tuple[str, int]:
    """(the lines up to the body, joined; index of the character after the name)."""
    first = node.body[0]
    last = max(node.lineno, _first_line(first) - 1)
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
