"""Find the functions of Python source, and the sentences of their docstrings that can be queries.

    functions(source, "email.message") -> Function(module, owner, name, rest, queries, lines), ...

The text of a document is `"{module} {owner}.{name}{rest}"`. `rest` is the source from the first parenthesis on, without the
docstring.
"""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

WORDS = (3, 40)  # shortest and longest query
QUERIES = 3  # the first sentence and at most two more
CHARACTERS = 6000  # of a document; the rest is beyond the longest document in tokens
SECTION = re.compile(
    r"^\s*(parameters?|args|arguments|keyword args|returns?|yields?|raises|examples?|notes?|references|see also|attributes|usage|"
    r"warnings?|todo)\b\s*:?\s*$|^\s*[:@]\w+|^\s*>>>|^\s*\.\. |^\s*[-=~*+#]{3,}\s*$",
    re.IGNORECASE | re.MULTILINE,
)
END = re.compile(r"(?<=[.!?])(?<!\be\.g\.)(?<!\bi\.e\.)\s+(?=[A-Z`\"'(\[])")
WORD = re.compile(r"[A-Za-z]+")
HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[\W_]+")


@dataclass(frozen=True)
class Function:
    """A function of Python code. `module`, `owner` (such as its class) and `name` say where it is. `rest` is its code from
    the first parenthesis on, without the docstring. `queries` are sentences of its docstring, the first one first. `lines`
    is the number of lines of its code.
    """

    module: str
    owner: str
    name: str
    rest: str
    queries: tuple[str, ...]
    lines: int  # of code in the body, without the docstring

    @property
    def text(self) -> str:
        """The document: module, qualified name, signature and body."""
        return f"{self.module} {self.owner + '.' if self.owner else ''}{self.name}{self.rest}"


def functions(source: str, module: str) -> Iterator[Function]:
    """Yield the functions and methods of `source` that have a body of code. Source that does not parse has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    lines = source.splitlines(keepends=True)
    yield from _inside(tree, "", lines, module)


def _inside(node: ast.AST, owner: str, lines: list[str], module: str) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _inside(child, f"{owner}.{child.name}" if owner else child.name, lines, module)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            found = _function(child, owner, lines, module)
            if found:
                yield found
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from _inside(child, owner, lines, module)


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, owner: str, lines: list[str], module: str) -> Function | None:
    """Return the function `node` without its docstring. Return None for a stub, or if the docstring shares its lines with
    code. `owner` is the name of its class or outer function. `lines` are the lines of the source.
    """
    first, last = node.lineno - 1, node.end_lineno or node.lineno
    doc = ast.get_docstring(node, clean=False)
    body = node.body[1:] if doc is not None else node.body
    if not body:
        return None
    cut = range(0)
    if doc is not None:
        cut = range(node.body[0].lineno - 1, node.body[0].end_lineno or 0)
        if cut.start <= first or body[0].lineno - 1 < cut.stop:
            return None
    kept = "".join(lines[n] for n in range(first, last) if n not in cut)
    start = kept.find("(")
    if start < 0:
        return None
    code = [n for n in range(body[0].lineno - 1, last) if (line := lines[n].strip()) and not line.startswith("#")]
    queries = sentences(doc) if doc else ()
    return Function(module, owner, node.name, kept[start : start + CHARACTERS], queries, len(code))


def sentences(doc: str) -> tuple[str, ...]:
    """Return up to `QUERIES` sentences of a docstring's prose, the first sentence first. If the first sentence cannot be a
    query, none is returned.
    """
    doc = inspect.cleandoc(doc)
    section = SECTION.search(doc)
    prose = doc[: section.start()] if section else doc
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n", prose)[:3]:
        for sentence in END.split(" ".join(paragraph.split())):
            if is_query(sentence) and sentence not in found:
                found.append(sentence)
            elif not found:
                return ()
            if len(found) == QUERIES:
                return tuple(found)
    return tuple(found)


def is_query(sentence: str) -> bool:
    """Return True if a sentence can be a query: it has a usual length, and consists mostly of English letters."""
    words = sentence.split()
    letters = sum(map(len, WORD.findall(sentence)))
    return WORDS[0] <= len(words) <= WORDS[1] and letters >= 0.6 * len(sentence.replace(" ", "")) and len(sentence) <= 400


def words_of(name: str) -> list[str]:
    """Return the words of an identifier: `parseHTTPHeader` is parse, HTTP, Header."""
    return [word for word in HUMP.split(name) if word]
