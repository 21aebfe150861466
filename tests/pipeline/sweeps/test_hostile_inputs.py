"""Generated hostile sources, rules, queries and containers: one line or a row with the reason, in little time and memory, and
nothing is lost for another's sake."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import itertools
import json
import logging
import os
import random
import resource
import shutil
import signal
import socket
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests import projects
from tests.pipeline.forks import NEVER, Forks
from tests.stages.models.test_hostile import mutated_bytes, mutated_json
from tests.stages.retrieval import project as small

pytestmark = [pytest.mark.slow, pytest.mark.skipif("sys.platform != 'linux'", reason="disk.c is preloaded on Linux alone")]

SECONDS = 10  # of CPU that one input may take
FACTOR = 2  # times the memory of the honest input
WARNINGS = ("FutureWarning", "SyntaxWarning", "DeprecationWarning")
Make = Callable[[Path, random.Random], object]
HONEST = ("flat/words.py", "flat/paths.py", "deep/lines.py", "deep/dates.py")
ROOT = projects.ROOT

# Sources

NESTED: dict[str, Callable[[int], str]] = {
    "brackets.py": lambda n: f"def a(x):\n    return {'(' * n}x{')' * n}\n",
    "open.py": lambda n: "(" * n,
    "not.py": lambda n: f"x = {'not ' * n}1\n",
    "dots.py": lambda n: f"x = a{'.b' * n}\n",
    "parameters.py": lambda n: (
        f"def a({', '.join(f'b{each}' for each in range(n))}):\n    return 1\n    # more\n    # and more\n"
    ),
    "quotes.py": lambda n: "'" * n,
    "doc.py": lambda n: f'def a():\n    """{"word " * n}"""\n    x = 1\n    return x\n',
    "escapes.py": lambda n: "def a():\n    '''\\ud800 \\N{LATIN SMALL LETTER A} \\x00'''\n    x = 1\n    return x\n" + "\\" * n,
    "format.py": lambda n: "x = " + "f'{" * min(n, 300) + "1" + "}'" * min(n, 300) + "\n",
    "lines.py": lambda n: "\n" * n * 10,
    "spaces.py": lambda n: " " * n * 10 + "x\n",
    "comment.h": lambda n: "/*" * n,
    "templates.cpp": lambda n: f"{'a<' * n}int{'>' * n} f() {{ return 1; }}\n",
    "macro.c": lambda n: "#define A \\\n" * n,
    "braces.c": lambda n: "int f() {" + "{" * n + "}" * n + "}\n",
    "jsx.tsx": lambda n: "<a>" * n,
    "types.rs": lambda n: f"fn f() -> {'Vec<' * n}u8{'>' * n} {{ loop {{}} }}\n",
    "raw.rs": lambda n: f'fn f() {{ let x = r{"#" * n}"a"{"#" * n}; }}\n',
    "deep.go": lambda n: f"package a\nfunc f() {{ x := {'(' * n}1{')' * n} }}\n",
    "dollars.sh": lambda n: "x=" + "$(" * n + ")" * n + "\n",
    "quotes.md": lambda n: "> " * n + "x\n",
    "stars.md": lambda n: "*" * n + "a" + "_" * n,
    "odd.ipynb": lambda n: json.dumps({"cells": [{"cell_type": 1, "source": {"a": [None] * n}}, None, 5, "x"]}),
    "coding.py": lambda n: "# -*- coding: rot13 -*-\nqrs n():\n    erghea 1\n" * (n // 100 + 1),
    "zlib.py": lambda n: "# coding: zlib\nx\n",
    "utf7.py": lambda n: "# coding: utf-7\n+AGEAYg-\n" + "+" * n,
    "unknown.py": lambda n: f"# coding: {'x' * n}\nx = 1\n",
    "merge.py": lambda n: "<<<<<<< a\n" * n + "=======\n>>>>>>> b\n",
}
ODD = ("x = 1\n", "\ufeff\ufeff", "\x00" * 90, "\u2028\x85\x0b", "\u202edef a():\n", "😀" * 500, "\x1b]0;t\x07", "Z͑ͫ̓ͪ" * 900)


def nested(folder: Path, draw: random.Random) -> None:
    name = draw.choice(list(NESTED))
    text = NESTED[name](draw.choice((10, 150, 999, 1200, 5_000, 40_000)))
    path = folder / "code" / f"hostile {name}"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))


def mutated_source(folder: Path, draw: random.Random) -> None:
    """A file of this repository with changed bytes, under the suffix of any language."""
    sources = [*ROOT.glob("stages/*/*.py"), *ROOT.glob("*.md"), *ROOT.glob("pipeline/page/static/*.js"), ROOT / "Makefile"]
    choice = draw.choice(sources)
    data = choice.read_bytes()[:60_000]
    for _ in range(draw.randint(1, 9)):
        data = mutated_bytes(data, draw)
    suffixes = ("", ".py", ".c", ".ts", ".rs", ".go", ".java", ".rb", ".sh", ".md", ".ipynb", ".cs", ".php", ".swift")
    (folder / "code" / f"hostile{draw.choice(suffixes) or choice.suffix}").write_bytes(data)


def odd_text(folder: Path, draw: random.Random) -> None:
    text = "".join(draw.choice(ODD) for _ in range(draw.randint(1, 20)))
    data = text.encode(draw.choice(("utf-8", "utf-16", "utf-32", "utf-7")), "replace") + draw.randbytes(draw.choice((0, 3)))
    (folder / "code" / f"hostile{draw.choice(('.py', '.md', '.js', '.ipynb', ''))}").write_bytes(data)


def odd_name(folder: Path, draw: random.Random) -> None:
    name = draw.choice((
        b"\xff\xfe.py", b"a\nb.py", b"\x1b]0;t\x07.py", b"-rf.py", b"a" * 252 + b".py", b" .py", b"...py", b"CON.py", b"a:b.py",
        "\u202e.py".encode(), "é.py".encode(), b"e\xcc\x81.py", b"%s%n.py", b"'; drop table x;--.py", b"*.py", b"[z-a].py",
    ))  # fmt: skip
    path = os.fsencode(folder / "code") + b"/" + name
    with open(path, "wb") as file:  # noqa: PTH123  (a name of bytes)
        file.write(b"def hostile_name():\n    x = 1\n    y = 2\n    z = 3\n    return x + y + z\n")


def odd_file(folder: Path, draw: random.Random) -> None:
    path = folder / "code" / "hostile.py"
    kind = draw.randrange(9)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        with socket.socket(socket.AF_UNIX) as made:
            here = Path.cwd()
            os.chdir(path.parent)  # the name of a socket may have 107 bytes
            made.bind(path.name)
            os.chdir(here)
    elif kind in (2, 3, 4, 5, 6):
        path.symlink_to(("/dev/zero", "/dev/tty", "/proc", "/", "hostile.py")[kind - 2])
    elif kind == 7:
        here = os.open(folder / "code", os.O_RDONLY)
        for _ in range(300):
            os.mkdir("d", dir_fd=here)
            here = os.open("d", os.O_RDONLY, dir_fd=here)
    else:
        with path.open("wb") as file:
            file.truncate(10**11)


def rules(folder: Path, draw: random.Random) -> None:
    pieces = (*"*/[]!\\? {}#.a\té\x00", "**", "[!", "[a-z]", "[z-a]", "**/", "/**", "[[:alpha:]]")
    lines = ["".join(draw.choice(pieces) for _ in range(draw.randint(1, 40))) for _ in range(draw.choice((1, 5, 500)))]
    # Rules of these pieces may leave out anything; the last ones take all honest files in again.
    text = "\n".join([*lines, *("!/" + str(part) for name in HONEST for part in (Path(name).parent, name))])
    (folder / "code" / ".gitignore").write_bytes(text.encode())
    (folder / "code" / ("a" * 60 + ".py")).write_text("x = 1\n")
    if draw.random() < 0.3:
        (folder / "code" / ".gitignore").write_bytes(draw.randbytes(3000) + b"\n*.txt\n!*\n!*/\n")


# Containers and captions

TEXTS = (b"{" * 5000, b"a caption", b"\xff\xfe", b'{"text": 5}')


def picture(draw: random.Random, side: int = 80) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(draw.randrange(2**32)).integers(0, 256, (side, side, 3), np.uint8)
    Image.fromarray(noise, "RGB").save(file, "PNG")
    return file.getvalue()


def hostile_tar(folder: Path, draw: random.Random) -> None:
    names = ["a.png", "b.txt", "../c.png", "/etc/d.png", "e\x1b[31m.png", "f.json", "a.png", "\ud800.png", "x" * 300 + ".png"]
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=draw.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))) as opened:
        for name in draw.sample(names, draw.randint(1, len(names))):
            info = tarfile.TarInfo(name)
            if draw.random() < 0.2:
                kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE, b"S")
                info.type, info.linkname = draw.choice(kinds), "/etc/passwd"
            info.pax_headers = {"comment": "y" * draw.choice((0, 100, 100_000))}
            data = picture(draw) if name.endswith("png") else draw.choice(TEXTS)
            info.size = len(data)
            with contextlib.suppress(ValueError):  # a name that this format cannot have
                opened.addfile(info, io.BytesIO(data))
        for number in range(20_000 if draw.random() < 0.1 else 0):
            opened.addfile(tarfile.TarInfo(f"{number}.png"))
    made = bytearray(file.getvalue())
    if draw.random() < 0.6:  # a header lies: its size, type, checksum or name
        at = 512 * draw.randrange(max(1, min(9, len(made) // 512)))
        field, size = draw.choice(((124, 12), (156, 1), (148, 8), (0, 100), (257, 8), (329, 16)))
        fills = (b"\xff" * size, b"7" * size, b"\x80" + b"\x7f" * (size - 1), b"\0" * size, b"-" * size)
        made[at + field : at + field + size] = draw.choice(fills)
        if draw.random() < 0.7:  # and its checksum is right
            made[at + 148 : at + 156] = b" " * 8
            made[at + 148 : at + 156] = f"{sum(made[at : at + 512]):06o}\0 ".encode()
    (folder / "images" / "hostile.tar").write_bytes(mutated_bytes(bytes(made), draw) if draw.random() < 0.4 else bytes(made))


def hostile_table(folder: Path, draw: random.Random, suffix: str) -> None:
    """Pictures in a file of Parquet or Arrow."""
    values = [picture(draw) for _ in range(draw.randint(1, 6))]
    kind, file = draw.randrange(6), io.BytesIO()
    made = pa.table({"image": pa.array(values, pa.binary()), "text": ["a", None, "c" * 5000, "d", "e", "f"][: len(values)]})
    if kind == 0:  # one entry of a dictionary in many rows
        indices = pa.array(np.zeros(draw.choice((10, 3_000)), np.int32))
        made = pa.table({"image": pa.DictionaryArray.from_arrays(indices, pa.array([draw.randbytes(200_000)], pa.binary()))})
    elif kind == 1:  # zeros that are small when they are compressed
        made = pa.table({"image": pa.array([bytes(draw.choice((10_000, 300_000_000)))], pa.binary())})
    elif kind == 2:
        made = pa.table({"image": pa.array([{"bytes": value, "path": f"{'../' * 9}x"} for value in values])})
    elif kind == 3:
        odd = (pa.array([1.0]), pa.array([[b"a"]]), pa.array(["x" * 9]), pa.nulls(5))
        made = pa.table({draw.choice(("image", "x", "")): draw.choice(odd)})
    packed = "zstd" if kind == 1 else draw.choice((None, "zstd", "lz4"))
    if suffix == "parquet":
        packed = packed or draw.choice(("none", "snappy", "gzip", "brotli"))
        pq.write_table(made, file, compression=packed, store_schema=draw.random() < 0.5, use_dictionary=kind != 1)
    else:
        options = pa.ipc.IpcWriteOptions(compression=packed)
        with draw.choice((pa.ipc.new_stream, pa.ipc.new_file))(file, made.schema, options=options) as writer:
            writer.write_table(made)
    data = bytearray(file.getvalue())
    for _ in range(draw.randint(1, 4) if kind > 3 or draw.random() < 0.3 else 0):  # where counts and sizes stand
        at, size = draw.randrange(min(len(data), 900)), 1 if suffix == "parquet" else 8
        at = at if suffix == "arrow" and draw.random() < 0.5 else len(data) - 1 - at
        data[at : at + size] = draw.choice((b"\xff" * size, b"\0" * size, b"\x7f" * size, draw.randbytes(size)))[: len(data) - at]
    (folder / "images" / f"hostile.{suffix}").write_bytes(bytes(data))


def hostile_zip(folder: Path, draw: random.Random) -> None:
    path = folder / "images" / "hostile.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a.png", picture(draw))
        file.writestr("../b.png", bytes(draw.choice((10, 100_000_000))))
    path.write_bytes(mutated_bytes(path.read_bytes(), draw))


def hostile_metadata(folder: Path, draw: random.Random) -> None:
    name = draw.choice(("metadata.jsonl", "metadata.csv", "captions.json", "meta_cap.json"))
    rows: list[Any] = [{"file_name": "picture0.png", "text": "a"}, {"file_name": "picture1.png", "text": ["b", "c"]}]
    rows = [mutated_json(row, draw) if draw.random() < 0.5 else row for row in rows] * draw.choice((1, 1, 1, 2_000))
    text = "\n".join(json.dumps(row) for row in rows) if name.endswith("jsonl") else json.dumps(rows)
    if name.endswith("csv"):
        long = 9000 if len(rows) < 9 else 9
        text = "\n".join(["file_name,text", *(f"picture0.png,{'x' * draw.choice((1, long))}" for _ in rows)])
    data = text.encode("utf-8", "surrogatepass")
    (folder / "images" / name).write_bytes(mutated_bytes(data, draw) if draw.random() < 0.7 else data)


# Queries

QUERIES = (
    "", " ", "\x00", "the of and", '"', "'", "a\"b", "(", ")", "AND", "OR NOT", "+a -b", "a~2", "a^9", "*", "?*", "a:b",
    "field:", "[a TO b]", "\\",
    "\ud800", "\u202e", "😀", "é" * 50, "-", "--help", "%", "%s", "{}", "$(id)", "; drop table units", "../../etc/passwd",
    "\n\n", "\r",
    "\x1b[2J",
    "0", "-1", "1e999", "nan", "true", "null", "select * from units",
)  # fmt: skip
PATTERNS = ("*", "**", "a" * 3000, "*a" * 30 + "b", "[", "[!", "[z-a]", "/", "..", "../*", "\x00", "", "\\")
REGEXES = ("(a+)+$", "(.*)*b", "(", "[", "*", "a{99999}", "(?P<a>b)(?P<a>c)", "\\", "(?<=a+)b", "^(([a-z])+.)+[A-Z]([a-z])+$", "")


def query_of(draw: random.Random) -> str:
    text, several = draw.choice(QUERIES), " ".join(draw.choice(QUERIES) for _ in range(9))
    return draw.choice((text, text * 1000, several, text + " count words", "count words " * 20_000))


def words_of(draw: random.Random) -> list[str]:
    """A call of `search` or `find`, PROJECT and CODE for the folders."""
    path = ["--path", draw.choice(PATTERNS)]
    if draw.random() < 0.5:
        limit = ["--limit", draw.choice(("0", "-1", "999999999", "1e3"))]
        return ["search", "--project", "PROJECT", *draw.choice(([], limit, path)), "--", query_of(draw)]
    options = draw.choice(([], ["--regex", draw.choice(REGEXES)], path, ["--threshold", draw.choice(("nan", "-1", "9", "x"))]))
    return ["find", *options, *(["--json"] if draw.random() < 0.2 else []), "--", query_of(draw), "CODE"]


def call_of(draw: random.Random) -> tuple[str, dict[str, Any]]:
    number = draw.choice((0, 1, -1, 2**31, 2**63, 10**30))
    odd = ("", "\x00", "../" * 9 + "etc/passwd", "a" * 5000, "flat/words.py\n")
    path = draw.choice((*odd, "flat/words.py", "/etc/passwd", "flat", "~", "flat/../flat/words.py"))
    tool = draw.choice(("search", "search", "related", "read", "status"))
    given: dict[str, Any] = {
        "search": {"query": query_of(draw), "path": draw.choice(PATTERNS), "limit": number, "folder": draw.choice(("", path))},
        "related": {"path": path, "line": number, "limit": draw.choice((5, number))},
        "read": {"path": path, "first_line": number, "last_line": draw.choice((number, number + 5, 10))},
        "status": {},
    }[tool]
    if draw.random() < 0.3 and given:
        given[draw.choice(list(given))] = draw.choice((None, [], {}, "x" * 9, 1.5, True, [[1]], "nan"))
    return tool, given


# What runs in a fork: each returns (what became of honest input, error's line or "", CPU seconds, peak memory in MB)

Told = tuple[Any, str, float, int]


def measured(work: Callable[..., Any]) -> Callable[..., Told]:
    @functools.wraps(work)
    def told(*given: Any) -> Told:
        hard = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + 3 * SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
        signal.alarm(30 * SECONDS)
        before, said, found = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]), "", None
        try:
            found = work(*given)
        except ValueError as error:
            said = str(error)
            assert said and "\n" not in said, repr(said)
        used = resource.getrusage(resource.RUSAGE_SELF)
        return found, said, sum(used[:2]) - before, used.ru_maxrss // 1024

    return told


@measured
def sources(path: str) -> Any:
    projects.build(Path(path), "sources", "units", "pairs", "tokens")
    rows = small.rows(Path(path), "units")
    return sorted(row["qualified_name"] for row in rows if row["path"].partition("/")[2] in HONEST)


@measured
def pictures(path: str) -> Any:
    projects.build(Path(path), "images")
    rows = small.rows(Path(path), "images")
    with contextlib.suppress(ValueError):  # a wrong caption file is a mistake of the user, who is told the line
        projects.build(Path(path), "captions")
    return sorted(row["path"] for row in rows if row["rejected"] is None and row["path"].startswith("picture"))


@measured
def ask(path: str, words: list[str]) -> None:
    places = {"PROJECT": path, "CODE": f"{path}/code"}
    code, _, err = projects.said(*(places.get(word, word) for word in words))
    nothing = code == 1 and words[0] == "find"  # found
    assert (code in (0, 2) or nothing) and not any(each in err for each in (*NEVER, *WARNINGS)), f"{code}: {err[-900:]}"
    assert code != 2 or sum(line.startswith(("error: ", "Error: ")) for line in err.splitlines()) == 1, err[-900:]


@measured
def call(path: str, tool: str, given: dict[str, Any]) -> None:
    from mcp.server.mcpserver.exceptions import ToolError

    from pipeline.commands.retrieval.mcp import make_server

    with contextlib.suppress(ToolError):
        asyncio.run(make_server([Path(path) / "code"]).call_tool(tool, given))


# The sweep

KINDS: dict[str, tuple[Callable[..., Told], Make | None]] = {
    "nested": (sources, nested),
    "mutated source": (sources, mutated_source),
    "odd text": (sources, odd_text),
    "odd name": (sources, odd_name),
    "odd file": (sources, odd_file),
    "rules": (sources, rules),
    "tar": (pictures, hostile_tar),
    "Parquet": (pictures, functools.partial(hostile_table, suffix="parquet")),
    "Arrow": (pictures, functools.partial(hostile_table, suffix="arrow")),
    "zip": (pictures, hostile_zip),
    "metadata": (pictures, hostile_metadata),
    "query": (ask, None),
    "call": (call, None),
}


@pytest.mark.proof(
    "a hostile input of either pipeline is one line or a row, within twice the memory, and costs no other its place"
)
def test_a_hostile_input_is_one_line_or_a_row_and_nothing_else_is_lost(
    tiny_weights: Path, forks: Forks, request: pytest.FixtureRequest, tmp_path: Path, cases: Callable[[int, int], int]
):
    folders = {work: tmp_path / "honest" / work.__name__ / "project" for work in (sources, pictures, ask)}
    folders[sources].mkdir(parents=True)
    small.make(folders[sources])
    projects.make(folders[pictures], tiny_weights, images=2)
    shutil.copytree(folders[sources], folders[ask])
    projects.build(folders[ask])
    folders[call] = folders[ask]

    def told(work: Callable[..., Told], make: Callable[[Path], object] | None, *given: Any) -> Told:
        copy = folders[work]
        if make:
            copy = shutil.copytree(folders[work], tmp_path / "copy" / "project", symlinks=True)
            make(copy)
        try:
            done = forks.call(work, copy, *given)
            assert not any(each in done.text for each in WARNINGS), done.text[-1500:]
            found: Told = done.value
            return found
        finally:
            shutil.rmtree(tmp_path / "copy", ignore_errors=True)

    told(ask, None, ["find", "count words", "CODE"])  # the first call builds the index
    plain = {work: told(work, lambda copy: None) for work in (sources, pictures)}
    plain |= {ask: told(ask, None, ["find", "count words", "CODE"]), call: told(call, None, "status", {})}
    outcomes, failures = Counter[str](), []
    for number, kind in zip(range(cases(len(KINDS), 500)), itertools.cycle(KINDS), strict=False):
        draw = random.Random(f"{number} {kind}")
        work, make = KINDS[kind]
        given: list[Any] = [words_of(draw)] if work is ask else list(call_of(draw)) if work is call else []
        try:
            found, said, seconds, memory = told(work, make and functools.partial(make, draw=draw), *given)
            assert seconds < SECONDS, f"{seconds:.1f} s of CPU"
            assert memory < FACTOR * plain[work][3], f"{memory} MB, honest {plain[work][3]}"
            assert found == plain[work][0], f"{found}, {said!r}"
            outcomes[f"{kind}: {'one line' if said else 'used or a row'}"] += 1
        except AssertionError as error:
            failures.append(f"case {number}: {kind} {given or ''}: {error}"[:3000])
            logging.warning(failures[-1])
    request.node.user_properties.append(("of", dict(outcomes)))
    assert not failures, "\n\n".join(failures)
