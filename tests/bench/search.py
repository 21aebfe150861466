"""Costs and recall of a search: `python -m tests.bench.search FOLDER`, of a project whose index is built, or of source code that
`latentmill find` has read before.

Times are of CPU: of a query while the index stays open, as in `search --stdin` and `mcp` (opening it and the first are not
counted); for source code, also of a whole process of `find` when nothing has changed and, with `--edit`, when one file has; of
ripgrep and semble beside, where they are on the PATH. `--recall` compares the ten best by meaning with those of a comparison with
every unit.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import click
import numpy as np

import stages  # noqa: F401  (before mlx.core)
from pipeline.commands.retrieval.find import open_project
from pipeline.commands.retrieval.search import Session
from pipeline.project.config import FILE
from pipeline.project.project import Project
from schemas.retrieval import UNITS
from stages.retrieval.search import ranking

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
    """Return the median milliseconds of CPU time and of elapsed time of a query. Every query of `QUERIES` is
    asked `rounds` times, after one round that is not counted. `mode` is "semantic", "lexical" or "hybrid".
    """
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
    known = sorted({query for query in project.rows(UNITS, "search", ("query",))["query"].to_pylist() if query})
    queries = [known[place] for place in np.random.default_rng(0).permutation(len(known))[:count].tolist()]
    assert searcher.encoder, "the project has an encoder"
    vectors = [searcher.encoder.encode_queries([query])[0] for query in queries]
    blocks = (searcher.ids[first : first + BLOCK] for first in range(0, len(searcher.ids), BLOCK))
    exact = np.concatenate([searcher.read(block).scores(vectors) for block in blocks], axis=1)
    everywhere, shares = np.arange(len(searcher.ids)), []
    for query, own, scores in zip(queries, vectors, exact, strict=True):
        found = searcher.matrix.scores(own, everywhere, searcher.words.scores(ranking.telling(query)), TOP)
        best = (set(np.argsort(-each, kind="stable")[:TOP].tolist()) for each in (found, scores))
        shares.append(len(set.intersection(*best)) / TOP)
    return statistics.mean(shares)


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


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.option("--rounds", default=4, show_default=True)
@click.option("--edit", type=click.Path(path_type=Path, exists=True), help="A Python file of FOLDER; it is restored.")
@click.option("--recall", "queries", default=0, help="How many docstrings are asked; 0: none.")
@click.option("--note", default="", help="What the row says besides.")
@click.option("--table", type=click.Path(path_type=Path), help="A JSONL file to which the row is added.")
def main(folder: Path, rounds: int, edit: Path | None, queries: int, note: str, table: Path | None) -> None:
    code = not (folder / FILE).is_file()
    project = open_project(folder.resolve()) if code else Project(folder)
    row: dict[str, float | str] = {"folder": folder.name, **({"note": note} if note else {})}
    if code:
        row |= of_processes(folder, rounds, edit)
        project = open_project(folder.resolve())
        kinds = project.rows(UNITS, "search", ("kind",))["kind"].to_pylist()
        row |= {"units": len(kinds), "functions": sum(kind in ("function", "method") for kind in kinds)}
        files = (path.stat() for path in (project.path / "tables").rglob("*") if path.is_file())
        row["kb_per_unit"] = sum({each.st_ino: each.st_size for each in files}.values()) / len(kinds) / 1e3
    for mode in ("lexical", "semantic", "hybrid"):
        used, elapsed = measure(project, mode, rounds)
        click.echo(f"{mode:9} {used:6.1f} ms of CPU time, {elapsed:6.1f} ms elapsed")
        row[f"{mode}_ms"] = used
    if queries:
        row |= {"recall_at_10": recall(project, queries), "queries": queries}
    row = {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}
    row |= {"load": round(os.getloadavg()[1], 1), "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}"}
    row |= {"python": platform.python_version(), "date": date.today().isoformat()}
    if table:
        with table.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    for name, value in row.items() if code else ():
        click.echo(f"{name:13} {value}")


if __name__ == "__main__":
    main()
