"""`latentmill search`: finds functions by what they do, in the index of a project of the pipeline retrieval."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from pipeline.options import with_project
from pipeline.terminal import give, say_aside, tell

if TYPE_CHECKING:
    from pipeline.project.project import Project
    from stages.models.family import RetrieverFamily
    from stages.retrieval.index import Answer, Mode, Searcher

Row = dict[str, Any]

THRESHOLD = "Least match of an answer, 0 to 1: how much of the query its code and its words hold."
MOST_LETTERS = 100_000  # of a line of --stdin
SPACES = "\u0120\u2581"  # what tokenizers write for the space before a word


@click.command("search")
@click.argument("query", required=False)
@click.option("--semantic", "mode", flag_value="semantic", help="By meaning: the vectors of the encoder.")
@click.option("--lexical", "mode", flag_value="lexical", help="By words: full-text search; loads no model.")
@click.option("--hybrid", "mode", flag_value="hybrid", default=True, help="By both (the default).")
@click.option("--limit", "-n", default=10, show_default=True, type=click.IntRange(1, 1000), help="Units to show at most.")
@click.option("--path", "patterns", multiple=True, help='Only files whose path matches, such as "*/email/*"; may be repeated.')
@click.option("--threshold", default=0.0, show_default=True, type=click.FloatRange(0, 1), help=THRESHOLD)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per query.")
@click.option("--explain", is_flag=True, help="Which token of the query matched which token of the code.")
@click.option("--stdin", "stay", is_flag=True, help="Stay up: read queries from standard input, one per line.")
@with_project
def command(
    query: str | None,
    mode: str,
    limit: int,
    patterns: tuple[str, ...],
    threshold: float,
    as_json: bool,
    explain: bool,
    stay: bool,
    project: Project,
) -> None:
    """Find functions by what they do. QUERY is a sentence or some words; with --stdin it is ignored. Run `make index`
    first: it builds the project's index.
    """
    if not stay and not (query or "").strip():
        raise ValueError('search needs a query, such as: latentmill search "read a file line by line"')
    if explain and mode == "lexical":
        raise ValueError("--explain shows vectors, which --lexical does not use: leave one of them out")
    project.fetch = True
    session = Session(project, cast("Mode", mode), explain=explain)
    say = give if as_json else tell
    if line := staleness(project):
        say_aside(line)
    for text in queries() if stay else [query or ""]:
        try:
            answers = session.searcher.search(text, session.mode, limit, patterns, least=threshold)
        except ValueError as error:
            if not stay:
                raise
            say(json.dumps({"query": text, "error": str(error)}) if as_json else f"error: {error}")
            continue
        explained = [session.explain(text, answer) if explain else None for answer in answers]
        lines = [as_line(text, mode, answers, explained)] if as_json else as_text(answers, explained)
        say("\n".join(lines) or "nothing found")
        # With --stdin, a program reads the answer before it sends the next query.
        sys.stdout.flush()


def queries() -> Iterator[str]:
    """The lines of standard input. Raises ValueError for a line without an end, which would fill the memory."""
    while line := sys.stdin.readline(MOST_LETTERS + 1):
        if len(line) > MOST_LETTERS:
            raise ValueError(f"--stdin: a query may have {MOST_LETTERS:,} characters, and a line has more")
        yield line.strip()


def staleness(project: Project) -> str:
    """A line if files or settings have changed since the index was made, else ""."""
    from pipeline.commands.status import state
    from stages.bundled import shell_path

    sources, index = (max((found := state(project, name)).missing or 0, found.surplus) for name in ("sources", "index"))
    if not sources and not index:
        return ""
    files = "1 file is" if sources == 1 else f"{sources} files are"
    what = f"{files} newer than the index" if sources else "the index is of other settings"
    return f"{what}: make index PROJECT={shell_path(project.path)}"


class Session:
    """The index of a project, opened for queries in one mode."""

    def __init__(self, project: Project, mode: Mode, *, explain: bool = False) -> None:
        from schemas.retrieval import INDEX, VECTORS
        from stages.models.family import Reading
        from stages.retrieval.encoder import TextTokenizer
        from stages.retrieval.index import Searcher, folder_artifacts, in_order

        self.mode = mode
        table = project.built(INDEX, "search")
        rows = in_order(table.rows())
        if not rows.num_rows:
            raise ValueError("the index has no units: set sources.roots, then run make index")
        name = rows["encoder"][0].as_py()
        encoder = None if mode == "lexical" else open_encoder(project, name)
        for artifact in folder_artifacts(rows):
            table.require_intact(artifact)
        vectors = project.built(VECTORS, "search").tensors()
        self.searcher: Searcher = Searcher(rows, table.folder / "artifacts", vectors, encoder)
        self.texts: dict[str, str] = {}
        if explain:
            family = cast("RetrieverFamily", project.family)
            folder = project.component("tokenizer")
            reading = family.architecture.reading(folder)
            if reading != Reading():
                raise ValueError(f"--explain shows a vector per token, which {family.name} has not: leave it out")
            self.tokenizer = TextTokenizer(folder, lower_case=family.lower_case)
            self.config = project.config.sections["tokens"]
            units = project.folder("units").rows().select(["unit_id", "text"]).to_pylist()
            self.texts = {row["unit_id"]: row["text"] for row in units}

    def explain(self, query: str, answer: Answer) -> list[tuple[str, str, float]]:
        """For each token of `query`: (query token, best code token, dot product). `query` must be the last one searched."""
        texts = ((query, self.config.query_tokens), (self.texts[answer.row["unit_id"]], self.config.document_tokens))
        cut = [self.tokenizer.cut(self.tokenizer.encode([text])[0], longest) for text, longest in texts]
        ours, theirs = ([piece.lstrip(SPACES) or piece for piece in self.tokenizer.pieces(each)] for each in cut)
        return self.searcher.explain(answer, ours, theirs)


def open_encoder(project: Project, name: str) -> Any:
    """The encoder of the index: "base", or the sha256 of its adapter. Raises ValueError if that is not the project's."""
    from stages.hashing import file_sha256
    from stages.retrieval.encoder import load_encoder
    from stages.retrieval.texts import BASE
    from stages.tuner.checkpoint import ADAPTER

    adapter: Path | None = None
    if name != BASE:
        adapter = project.folder("train").folder / "artifacts" / ADAPTER
        if not adapter.is_file() or file_sha256(adapter) != name:
            raise ValueError(f"the index holds vectors of the adapter {name[:8]}, which is not the project's: run make index")
    longest = project.config.sections["tokens"].query_tokens
    paths = project.component("encoder"), project.component("tokenizer")
    family = cast("RetrieverFamily", project.family)
    strength = project.config.sections["vectors"].strength
    return load_encoder(*paths, family, adapter, query_tokens=longest, strength=strength)


def as_line(query: str, mode: str, answers: list[Answer], explained: Iterable[Any]) -> str:
    """One JSON object. `explained` has the matches of each answer, or None."""
    found = []
    for answer, matches in zip(answers, explained, strict=True):
        columns = ("path", "file", "qualified_name", "first_line", "last_line", "signature")
        row = {name: answer.row[name] for name in columns}
        row |= {"match": round(answer.match, 4), "score": answer.score, "semantic": answer.semantic, "lexical": answer.lexical}
        if matches is not None:
            row["matches"] = [{"query": one, "code": other, "product": round(value, 4)} for one, other, value in matches]
        found.append(row)
    return json.dumps({"query": query, "mode": mode, "results": found}, ensure_ascii=False)


def as_text(answers: list[Answer], explained: Iterable[Any]) -> list[str]:
    lines = []
    for answer, matches in zip(answers, explained, strict=True):
        row = answer.row
        signature = row["signature"] or row["qualified_name"]
        owner = row["qualified_name"].rpartition(".")[0]
        lines.append(f"{answer.score:6.3f}  {row['path']}:{row['first_line']}  {f'[{owner}] ' if owner else ''}{signature[:100]}")
        for one, other, value in matches or ():
            lines.append(f"          {one} ~ {other}  {value:.2f}")
    return lines
