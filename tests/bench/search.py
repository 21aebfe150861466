"""Costs and recall of a search: `python -m tests.bench.search`, of 2,000 and of 50,000 functions of the packages installed here,
whose vectors are made up; with FOLDER, of a project whose index is built, or of source code that `latentmill find` has read
before.

Times are of CPU: of a query while the index stays open, as in `search --stdin` and `mcp` (opening it and the first are not
counted); for source code, also of a whole process of `find` when nothing has changed, alone and while `mcp` is up, and, with
`--edit`, when one file has; of ripgrep and semble beside, where they are on the PATH. `--recall` compares the ten best by meaning
with those of a comparison with every unit. `--encode N` measures nothing but that, over N functions of installed packages whose
vectors are the encoder's, and needs no Lance: for a machine with a GPU.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from multiprocessing import get_context
from pathlib import Path

import click
import numpy as np
import psutil

import stages  # noqa: F401  (before mlx.core)
from pipeline.commands.retrieval.find import kept, open_project, refresh
from pipeline.commands.retrieval.resident import FOLDER, name_of
from pipeline.commands.retrieval.search import Session
from pipeline.project.config import FILE
from pipeline.project.project import Project
from schemas.retrieval import UNITS
from stages.retrieval.search import maxsim, ranking
from tests.bench.corpus import FUNCTIONS, Encoded, copy_installed, made_up

SIZES, ASKED = (2000, 50_000), 200  # functions; queries of --encode
QUERIES = (
    "split a path into root and extension",
    "read a file line by line",
    "parse a date from text",
    "find the longest matching block of two sequences",
    "copy a directory tree",
    "the offset of a time zone from UTC",
    "send a request and return the response",
)
EDIT = "\n\ndef added_by_a_benchmark(first, second):\n    total = first + second\n    return total\n"
TOP, BLOCK = 10, 2000  # answers that are compared; units whose vectors are held at once
BESIDE = {"rg": ("rg", "-n", "-i", "file"), "semble": ("semble", "search", QUERIES[1])}  # each before the folder


def measure(project: Project, mode: str, rounds: int) -> tuple[float, float]:
    """Median milliseconds of CPU time and of elapsed time of a query, after one round that is not counted."""
    session = Session(project, mode)  # type: ignore[arg-type]
    used, elapsed = [], []
    for number in range((rounds + 1) * len(QUERIES)):
        began, cpu = time.perf_counter(), time.process_time()
        session.searcher.search(QUERIES[number % len(QUERIES)], session.mode)
        used.append(time.process_time() - cpu)
        elapsed.append(time.perf_counter() - began)
    return tuple(1e3 * statistics.median(each[len(QUERIES) :]) for each in (used, elapsed))  # type: ignore[return-value]


def recall(project: Project, count: int) -> float:
    """Share of the TOP best by meaning that a search finds, with `count` first sentences of docstrings as queries."""
    searcher = Session(project, "hybrid").searcher
    queries = draw(project.rows(UNITS, "search", ("query",))["query"].to_pylist(), count)
    assert searcher.encoder, "the project has an encoder"
    vectors = [searcher.encoder.encode_queries([query])[0] for query in queries]
    words = [searcher.words.scores(ranking.telling(query)) for query in queries]
    read = lambda places: searcher.read([searcher.ids[place] for place in places])  # noqa: E731
    return recall_of(searcher.matrix, read, len(searcher.ids), vectors, words)


def draw(queries: Sequence[str | None], count: int) -> list[str]:
    known = sorted({query for query in queries if query})
    return [known[place] for place in np.random.default_rng(0).permutation(len(known))[:count].tolist()]


def recall_of(
    matrix: maxsim.PooledMatrix,
    read: Callable[[Sequence[int]], maxsim.TokenMatrix],
    count: int,
    vectors: Sequence[np.ndarray],
    words: Sequence[np.ndarray],
) -> float:
    """`read`: the vectors of some of the `count` units. `vectors`, `words`: of each query, and the scores of its words."""
    blocks = (range(first, min(first + BLOCK, count)) for first in range(0, count, BLOCK))
    exact = np.concatenate([read(block).scores(vectors) for block in blocks], axis=1)
    everywhere, shares = np.arange(count), []
    for own, worded, scores in zip(vectors, words, exact, strict=True):
        found = matrix.scores(own, everywhere, worded, TOP)
        best = (set(np.argsort(-each, kind="stable")[:TOP].tolist()) for each in (found, scores))
        shares.append(len(set.intersection(*best)) / TOP)
    return statistics.mean(shares)


def encoded(count: int) -> dict[str, float | str]:
    """The row of `--encode`."""
    began = time.perf_counter()
    corpus = Encoded(count, click.echo)
    queries = draw([unit["query"] for unit in corpus.units], ASKED)
    vectors = corpus.encoder.encode_queries(queries)
    words = corpus.words([ranking.telling(query) for query in queries])
    found = recall_of(corpus.matrix, corpus.read, len(corpus.units), vectors, list(words))
    functions = sum(unit["kind"] in FUNCTIONS for unit in corpus.units)
    row: dict[str, float | str] = {"note": "vectors of the encoder; words by a BM25 of the benchmark", "units": len(corpus.units)}
    row |= {"functions": functions, "recall_at_10": found, "queries": len(queries)}
    return row | {"seconds": time.perf_counter() - began}


def process(*words: str) -> tuple[float, float]:
    """(seconds of CPU, peak in GB) of a command that succeeds."""
    started = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(started.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise click.ClickException(f"{' '.join(words)} fails")
    return used.ru_utime + used.ru_stime, used.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def of_processes(folder: Path, rounds: int, edit: Path | None) -> dict[str, float | str]:
    """Medians of `rounds` processes each."""
    find = (sys.executable, "-m", "pipeline", "find", QUERIES[1], str(folder))
    cold = [process(*find) for _ in range(rounds)]
    found: dict[str, float | str] = {"cold_s": statistics.median(seconds for seconds, _ in cold)}
    found["cold_peak_gb"] = max(peak for _, peak in cold)
    found |= while_mcp_is_up(folder, find, rounds)
    if edit:
        before, edited = edit.read_bytes(), []
        try:
            for _ in range(rounds):
                edit.write_bytes(edit.read_bytes() + EDIT.encode())
                edited.append(process(*find))
        finally:
            edit.write_bytes(before)
        process(*find)
        found |= {"edit_s": statistics.median(seconds for seconds, _ in edited), "edit_peak_gb": max(peak for _, peak in edited)}
    for name, words in BESIDE.items():
        try:
            found[f"{name}_s"] = process(*words, str(folder))[0] if shutil.which(name) else "not installed"
        except click.ClickException:
            found[f"{name}_s"] = "fails"
    return found


def while_mcp_is_up(folder: Path, find: Sequence[str], rounds: int) -> dict[str, float | str]:
    """Seconds of CPU of a `find` that asks `mcp`, and of `mcp` for its answer; the first is not counted."""
    words = (sys.executable, "-m", "pipeline", "mcp", str(folder))
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as server:
        while not (FOLDER / f"{name_of(kept(folder.resolve()))}-{server.pid}").exists():
            time.sleep(0.1)
        asked, used = [], []
        for _ in range(rounds + 1):
            before = psutil.Process(server.pid).cpu_times()
            asked.append(process(*find)[0])
            after = psutil.Process(server.pid).cpu_times()
            used.append(after.user + after.system - before.user - before.system)
    return {"mcp_up_s": statistics.median(asked[1:]), "mcp_s": statistics.median(used[1:])}


def make(folder: Path, count: int) -> None:
    """Code of `count` functions, read by `find` with vectors that are made up."""
    copy_installed(folder, count)
    with made_up():
        refresh(open_project(folder))


@click.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path, exists=True))
@click.option("--size", "sizes", multiple=True, type=int, default=SIZES, show_default=True, help="Functions, without FOLDER.")
@click.option("--encode", "functions", type=int, help="Only the recall over this many functions, which are encoded.")
@click.option("--rounds", default=4, show_default=True)
@click.option("--edit", type=click.Path(path_type=Path, exists=True), help="A Python file of FOLDER; it is restored.")
@click.option("--recall", "queries", default=0, help="How many docstrings are asked; 0: none.")
@click.option("--note", default="", help="What the row says besides.")
@click.option("--table", type=click.Path(path_type=Path), help="A JSONL file to which the row is added.")
def main(
    folder: Path | None,
    sizes: tuple[int, ...],
    functions: int | None,
    rounds: int,
    edit: Path | None,
    queries: int,
    note: str,
    table: Path | None,
) -> None:
    if functions:
        report(encoded(functions), table)
        return
    if folder:
        measure_folder(folder, rounds, edit, queries, note, table)
        return
    for size in sizes:
        with tempfile.TemporaryDirectory() as place:
            os.environ["XDG_CACHE_HOME"] = f"{place}/cache"
            code = Path(place, "packages")
            # In a process of its own: the peak of a process that is started begins with that of its parent.
            maker = get_context("spawn").Process(target=make, args=(code, size))
            maker.start()
            maker.join()
            files = sorted(code.rglob("*.py"))
            measure_folder(code, rounds, files[len(files) // 2], 0, f"vectors made up; {note}".strip("; "), table)


def measure_folder(folder: Path, rounds: int, edit: Path | None, queries: int, note: str, table: Path | None) -> None:
    code = not (folder / FILE).is_file()
    project = open_project(folder.resolve()) if code else Project(folder)
    row: dict[str, float | str] = {"folder": folder.name, **({"note": note} if note else {})}
    if code:
        row |= of_processes(folder, rounds, edit)
        project = open_project(folder.resolve())
        kinds = project.rows(UNITS, "search", ("kind",))["kind"].to_pylist()
        row |= {"units": len(kinds), "functions": sum(kind in FUNCTIONS for kind in kinds)}
        files = (path.stat() for path in (project.path / "tables").rglob("*") if path.is_file())
        row["kb_per_unit"] = sum({each.st_ino: each.st_size for each in files}.values()) / len(kinds) / 1e3
    for mode in ("lexical", "semantic", "hybrid"):
        used, elapsed = measure(project, mode, rounds)
        click.echo(f"{mode:9} {used:6.1f} ms of CPU time, {elapsed:6.1f} ms elapsed")
        row[f"{mode}_ms"] = used
    if queries:
        row |= {"recall_at_10": recall(project, queries), "queries": queries}
    report(row, table, show=code)


def report(row: dict[str, float | str], table: Path | None, *, show: bool = True) -> None:
    row = {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}
    row |= {"load": round(os.getloadavg()[1], 1), "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}"}
    row |= {"python": platform.python_version(), "date": date.today().isoformat()}
    if table:
        with table.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    for name, value in row.items() if show else ():
        click.echo(f"{name:13} {value}")


if __name__ == "__main__":
    main()
