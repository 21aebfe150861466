"""Find the functions, methods and classes of Python source with the module `ast` of the running Python."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator
from itertools import pairwise

from stages.retrieval.texts import split_lines
from stages.retrieval.units.unit import Unit, code_units, windows

Function = ast.FunctionDef | ast.AsyncFunctionDef
DEFINES = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = (ast.If, ast.Try, ast.With)  # statements whose definitions belong to the module or class around them


START = re.compile(r"@|(?:async\s+)?def\s|class\s")  # of a definition that stands in no other


def python_units(source: str, *, classes: bool, window: int = 40) -> list[Unit] | None:
    """An inner function belongs to the outer; a class is its statements and methods' signatures. Of a file that does not parse,
    each definition for itself, and windows of the others; None if none parses.
    """
    try:
        return _python_units(source, classes, window)
    except RecursionError:  # expressions that are nested a thousand deep are written by programs
        return None


def _python_units(source: str, classes: bool, window: int) -> list[Unit] | None:
    lines = split_lines(source)
    if tree := _parsed(source):
        return [*_inside(tree, "", lines, classes), *_code(tree, lines, window)]
    starts = [n for n, line in enumerate(lines) if n and START.match(line) and not lines[n - 1].startswith("@")]
    found: list[Unit] = []
    parsed = False
    for first, end in pairwise([0, *starts, len(lines)]):
        part = "\n".join(lines[first:end])
        tree = _parsed(part)
        if tree is None:
            found += windows(part, window, first)
            continue
        parsed = parsed or bool(tree.body)
        ast.increment_lineno(tree, first)
        found += [*_inside(tree, "", lines, classes), *_code(tree, lines, window)]
    return found if parsed else None


def _parsed(source: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the user's code are not ours to report
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _code(tree: ast.Module, lines: list[str], window: int) -> Iterator[Unit]:
    """The statements of a module that define no function or class: its docstring, constants, type aliases, calls."""
    spans = [
        (node.lineno, node.end_lineno or node.lineno, _given(node))
        for node in tree.body
        if not isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef | Function)
        and not (isinstance(node, BLOCKS) and (_is_main(node) or any(isinstance(each, DEFINES) for each in ast.walk(node))))
        and "__all__" not in _given(node)  # names of the module's functions, which are units
    ]
    return code_units(lines, spans, window, ("#",))


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in {each.id for each in ast.walk(node.test) if isinstance(each, ast.Name)}


def _given(node: ast.stmt) -> list[str]:
    """The names that a statement gives values: A and B of A, B = 1, 2."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None) or getattr(node, "name", None)]
    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and type(node).__name__ != "TypeAlias":  # of Python 3.12
        return []
    return [each.id for target in targets if target for each in ast.walk(target) if isinstance(each, ast.Name)]


def _inside(node: ast.AST, owner: str, lines: list[str], classes: bool) -> Iterator[Unit]:
    waiting = [*ast.iter_child_nodes(node)][::-1]
    while waiting:  # without recursion: each elif stands in the one before
        child = waiting.pop()
        if isinstance(child, ast.ClassDef):
            if classes:
                yield _unit(child, owner, lines)
            yield from _inside(child, f"{owner}{child.name}.", lines, classes)
        elif isinstance(child, Function):
            yield _unit(child, owner, lines)
        elif isinstance(child, (*BLOCKS, ast.ExceptHandler)):
            waiting += [*ast.iter_child_nodes(child)][::-1]


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
        # "\\ud800" is half of a surrogate pair, which no text can hold.
        docstring=(ast.get_docstring(node) or "").encode(errors="backslashreplace").decode(),
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
