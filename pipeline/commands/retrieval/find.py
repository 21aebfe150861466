"""`latentmill find`: searches a folder of source code by meaning, without a project. A project of its own in the user's
cache folder holds the tables; before every answer its stages take up what has changed.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import click

from pipeline.commands.retrieval import resident
from pipeline.commands.retrieval.search import THRESHOLD
from pipeline.terminal import Say, format_seconds, give, hashing_of, say_aside, silent, tell, tell_code
from stages.hashing import text_sha256
from stages.settings import several

# Nothing large is imported above: a process that is up may know the answer.
if TYPE_CHECKING:
    import numpy as np

    from pipeline.commands.retrieval.search import Session
    from pipeline.project.project import Project
    from stages.retrieval.index import Answer, Mode, Searcher

STAGES = ("sources", "units", "pairs", "tokens", "vectors", "index")
BUSY = 600.0  # seconds that one search of a folder waits for another that takes up its changes
MARK = "complete"  # a file beside project.toml
SNIPPET = 5  # lines of a unit that are shown
SETTINGS = "\n[pairs]\nqueries = false\n"  # of a project that only searches
# The least match of an answer, chosen on 20 questions, of which it hid no right answer (the lowest: .32), and on 18 about other
# things, of which 17 found nothing.
LEAST = 0.3
# Texts per second: 1,014 in 42.3 s, on two cores of Linux with a load of 7 (27 November 2026).
RATE, RATE_OF = 24.0, "two busy cores of Linux; no Mac was measured"
MODEL = "The folder of another encoder: T5, ColBERT on ModernBERT (PyLate), or model2vec."
ENOUGH = 200  # texts of a run that its speed is taken from
MOST = 1000  # answers
MODES = ("semantic", "lexical", "hybrid")
Row = dict[str, Any]


@click.command("find")
@click.argument("query")
@click.argument("folder", default=".", type=click.Path(path_type=Path, exists=True))
@click.option("--semantic", "mode", flag_value="semantic", help="By meaning: the vectors of the encoder.")
@click.option("--lexical", "mode", flag_value="lexical", help="By words: full-text search; loads no model.")
@click.option("--hybrid", "mode", flag_value="hybrid", default=True, help="By both (the default).")
@click.option("--limit", "-n", default=5, show_default=True, type=click.IntRange(1, MOST), help="Answers to show at most.")
@click.option("--path", "patterns", multiple=True, help='Only files whose path in FOLDER matches "src/*.py"; may be repeated.')
@click.option("--regex", default="", help="Only code in which a line matches this regular expression.")
@click.option("--threshold", default=LEAST, show_default=True, type=click.FloatRange(0, 1), help=THRESHOLD)
@click.option("--model", type=click.Path(path_type=Path, exists=True, file_okay=False), help=MODEL)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(
    query: str,
    folder: Path,
    mode: str,
    limit: int,
    patterns: tuple[str, ...],
    regex: str,
    threshold: float,
    model: Path | None,
    as_json: bool,
) -> int:
    """Find code by meaning in FOLDER, by default the current one; it may be a single file. No project is needed: what was
    read is kept in the cache folder, and changed files are read again first. Files that git ignores are left out. The exit
    code is 1 if nothing is found.
    """
    if not query.strip():
        raise ValueError('find needs a query, such as: latentmill find "read a file line by line"')
    root = folder.resolve()
    project = kept(root, model)
    question: Row = {"query": query, "mode": mode, "limit": limit, "patterns": list(patterns), "regex": regex}
    question["threshold"] = threshold
    # The first reading takes long, and shows how far it is.
    reply = resident.ask(project, question) if has_index(project) else None
    if reply is None:
        with hashing_of("find"), CodeFolder(root, cast("Mode", mode), model).current(say_aside) as code:
            answers = [plain(each) for each in code.search(**question)]
    else:
        answers = reply["answers"]
        for line in reply["said"]:
            say_aside(line)
    if as_json:
        give(json.dumps({"query": query, "mode": mode, "results": [as_dict(each) for each in answers]}, ensure_ascii=False))
        return 0 if answers else 1
    for each in answers:
        head, lines = as_text(each)
        tell_code(head, "\n".join(lines), each["file"])
    if not answers:
        tell("nothing found")
    return 0 if answers else 1


def checked(question: object) -> Row:
    """Of `resident.ask`, which anybody may have sent: the arguments of `CodeFolder.search`. Raises ValueError."""
    kinds = {"query": str, "mode": str, "limit": int, "patterns": list, "regex": str, "threshold": float}
    if not isinstance(question, dict) or {name: type(value) for name, value in question.items()} != kinds:
        raise ValueError("a question is an object of " + ", ".join(f"{name} ({kind.__name__})" for name, kind in kinds.items()))
    if question["mode"] not in MODES or not 1 <= question["limit"] <= MOST or {*map(type, question["patterns"])} - {str}:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, limit from 1 to {MOST}, and patterns texts")
    return question


class CodeFolder:
    """A folder of source code that is asked once or, by a program that stays up, many times."""

    def __init__(self, root: Path, mode: Mode = "hybrid", model: Path | None = None) -> None:
        self.root, self.mode = root.resolve(), mode
        self.project = open_project(self.root, model)
        self.session: Session | None = None
        self._opened: object = None

    @contextmanager
    def current(self, say: Say = silent) -> Iterator[Self]:
        """Take up what has changed, and `say` what. Within the block no other process changes the index."""
        from pipeline.commands.retrieval.search import Session
        from pipeline.store.disk import stamp
        from pipeline.store.lock import locked
        from schemas.retrieval import INDEX

        with locked(self.project.path / "find.lock", BUSY):
            refresh(self.project, say)
            found = stamp(self.project.current(INDEX.name).folder / "manifest.json")
            if self.session is None or found != self._opened:
                self.session = None  # before the next, so that two are never in memory
                self.session, self._opened = Session(self.project, self.mode), found
            yield self

    @property
    def searcher(self) -> Searcher:
        assert self.session, "within `current` only"
        return self.session.searcher

    def search(
        self,
        query: str,
        limit: int,
        patterns: Sequence[str] = (),
        regex: str = "",
        threshold: float = LEAST,
        mode: Mode | None = None,
    ) -> list[Answer]:
        """`patterns`: wildcards for paths below the folder. `threshold`: least `match`. `mode`: instead of the folder's,
        which must not be lexical then. Raises ValueError for a wrong regex.
        """
        name = self.searcher.rows["path"][0].as_py().partition("/")[0]
        within = self.matching(regex) if regex else None
        paths = [f"{name}/{pattern}" for pattern in patterns]
        return self.searcher.search(query, mode or self.mode, limit, paths, within=within, least=threshold)

    def matching(self, regex: str) -> np.ndarray:
        """The places of the units with a line that matches."""
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        from stages.retrieval.texts import decode, split_lines

        def lines_of(text: str) -> np.ndarray:
            # RE2, whose time is linear: Python's own takes hours for "(a+)+$".
            return np.flatnonzero(pc.match_substring_regex(pa.array(split_lines(text), pa.string()), regex)) + 1

        try:
            lines_of("x")
        except (pa.ArrowException, UnicodeError) as error:
            reason = " ".join(str(error).split()).removeprefix("Invalid regular expression: ")
            raise ValueError(f"--regex must be a regular expression of RE2: {reason}, got {regex!r}") from None
        rows = self.searcher.rows
        files, first, last = (rows[name].to_pylist() for name in ("file", "first_line", "last_line"))
        lines: dict[str, np.ndarray] = {}
        for file in dict.fromkeys(files):
            lines[file] = lines_of("")
            with suppress(OSError):  # it may be read no more
                lines[file] = lines_of(decode((self.project.path / file).read_bytes()))
        wanted = (
            np.searchsorted(lines[file], one) < np.searchsorted(lines[file], end, "right")
            for file, one, end in zip(files, first, last, strict=True)
        )
        return np.flatnonzero(np.fromiter(wanted, bool, len(files)))


def kept(root: Path, model: Path | None = None) -> Path:
    """The folder of `open_project`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = text_sha256(*map(str, (root, model.resolve()) if model else (root,)))
    return cache / "latentmill" / "find" / f"{root.name}-{name[:12]}"


def has_index(project: Path) -> bool:
    return any(project.glob("tables/index/*/manifest.json"))


def open_project(root: Path, model: Path | None = None) -> Project:
    """The project of the source folder `root` in the cache folder, made if there is none. `model`: the folder of another encoder
    than the bundled one, each with a project of its own. Raises ValueError if it holds none that is known.
    """
    from pipeline.commands.retrieval import project_toml
    from pipeline.project.config import FILE
    from pipeline.project.project import Project

    options, settings = {"code": str(root), "family": "retriever-micro"}, SETTINGS
    if model:
        from stages.retrieval.families import family_of

        model = model.resolve()
        family = family_of(model)
        reading = family.architecture.reading(model)
        options |= {"family": family.name, "weights": str(model)}
        lengths = {"query_tokens": reading.query_tokens, "document_tokens": reading.document_tokens}
        settings += "\n[tokens]\n" + "".join(f"{key} = {value}\n" for key, value in lengths.items() if value)
    folder, text = kept(root, model), project_toml(options) + settings
    if not (folder / FILE).is_file() or (folder / FILE).read_text(encoding="utf-8") != text:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(text, encoding="utf-8")
    return Project(folder)


def refresh(project: Project, say: Say = silent) -> None:
    """Bring the index up to date; `say`: what will be read and encoded, and what was. ValueError if there is no source code."""
    from pipeline.runner import run
    from pipeline.store.disk import sync
    from pipeline.terminal import console_for
    from schemas.retrieval import INDEX

    began, made, changed = time.monotonic(), dict[str, int](), False
    root = project.config.sections["sources"].roots[0]
    first = not has_index(project.path)
    if first:
        say(f"{root} is read for the first time. What is read is kept in {project.path}; delete that folder to forget it.")
    # The recipe of an index that is complete for the files of `sources`. It is deleted before `sources` can change.
    mark = project.path / MARK
    known = mark.read_text(encoding="utf-8") if mark.is_file() else ""
    mark.unlink(missing_ok=True)
    sync(project.path)
    before = {} if first else skipped(project)
    for name in STAGES:
        project.refresh()
        if first and name == "vectors":
            say(to_encode(project))
        # Of a first reading, the time that is left is shown without a terminal too.
        with console_for(name, sys.stderr.isatty() or (first and name == "vectors" and say is not silent)) as console:
            outcome = run(project, name, console)
        made[name], changed = outcome.written, changed or not outcome.up_to_date
        if name == "sources":
            index = project.current(INDEX.name)
            if not changed and index.exists and index.folder.name == known:
                break
            project.refresh()
            files = skipped(project)
            if None not in files.values():
                raise ValueError(f"{root} holds no source file that can be searched")
    project.refresh()
    mark.write_text(project.current(INDEX.name).folder.name, encoding="utf-8")
    if changed:
        told = "read" if first else "the folder has changed"
        seconds = format_seconds(time.monotonic() - began)
        unreadable = [path for path, reason in files.items() if reason == "unreadable" != before.get(path)]
        parts = [f"{several(made['sources'] - len(unreadable), 'file')} read"]
        parts += [f"{len(unreadable)} cannot be read ({', '.join(sorted(unreadable)[:3])})"] if unreadable else []
        parts += [f"{len(before.keys() - files.keys())} gone"] if before.keys() - files.keys() else []
        say(f"{told}: {', '.join(parts)}, {several(made['vectors'], 'text')} of functions encoded; {seconds}")


def skipped(project: Project) -> dict[str, str | None]:
    """Of each file, why it is not used."""
    from schemas.retrieval import SOURCES

    return {row["path"]: row["skipped"] for row in project.rows(SOURCES, "find", ("path", "skipped")).to_pylist()}


def to_encode(project: Project) -> str:
    """What a first reading will encode, and how long that takes at the speed of the newest one on this machine."""
    from pipeline.store.table import TableFolder
    from schemas.retrieval import SOURCES, TOKENS, UNITS, VECTORS

    rate, of = RATE, RATE_OF
    manifests = project.path.parent.glob(f"*/tables/{VECTORS.name}/*/manifest.json")
    for path in sorted(manifests, key=lambda path: path.stat().st_mtime):
        with suppress(ValueError):  # damaged
            done = TableFolder(path.parent, VECTORS).manifest().get("facts", {}).get("run", {})
            if done.get("rows_written", 0) >= ENOUGH:
                rate, of = done["rows_written"] / done["seconds"], "the last folder that was read here"
    units, texts = (project.rows(schema, "find", schema.key).num_rows for schema in (UNITS, TOKENS))
    files = project.rows(SOURCES, "find")["skipped"].null_count  # null: read
    seconds = format_seconds(texts / rate)
    work = f"{units} functions and passages of {several(files, 'file')}"
    return f"{work} to encode: about {seconds}, at the {rate:.0f} texts/s of {of}"


def plain(answer: Answer) -> Row:
    """What is shown of an answer, of values that JSON has."""
    from stages.retrieval.texts import decode, split_lines

    row = {name: answer.row[name] for name in ("file", "qualified_name", "first_line", "last_line", "signature")}
    lines: list[str] = []
    with suppress(OSError):  # it may be read no more
        lines = split_lines(decode(Path(row["file"]).read_bytes()))
    first, last = row["first_line"], row["last_line"]
    snippet = lines[first - 1 : min(last, first - 1 + SNIPPET)]
    scores = {"match": answer.match, "score": answer.score, "semantic": answer.semantic, "lexical": answer.lexical}
    return {**row, **scores, "snippet": snippet}


def place(name: str) -> str:
    """Of a file, relative to the current folder if it lies below it."""
    file = Path(name)
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)


def as_dict(row: Row) -> Row:
    """`row`: from `plain`, as in `as_text`."""
    found = {"path": place(row["file"]), **row, "match": round(row["match"], 4), "snippet": "\n".join(row["snippet"])}
    found["signature"] = re.sub(r":\s*#[^'\"]*\Z", ":", row["signature"])
    return {name: value for name, value in found.items() if name != "file"}


def as_text(row: Row) -> tuple[str, list[str]]:
    """(line above the snippet, snippet)."""
    head = f"{place(row['file'])}:{row['first_line']}  {row['qualified_name']}  {row['match']:.2f}"
    return head, [*(f"    {line}" for line in row["snippet"]), ""]
