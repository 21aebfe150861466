"""Time of a query in a project whose index is built: `python -m tests.bench.search FOLDER`.

The index stays open, as in `latentmill search --stdin`. The time of opening it and of the first queries is not counted.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import click

import stages  # noqa: F401  (before mlx.core)
from pipeline.commands.retrieval.search import Session
from pipeline.project.project import Project

QUERIES = (
    "split a path into root and extension",
    "read a file line by line",
    "parse a date from text",
    "find the longest matching block of two sequences",
    "copy a directory tree",
    "the offset of a time zone from UTC",
    "send a request and return the response",
)


def measure(folder: Path, mode: str, rounds: int) -> tuple[float, float]:
    """Return the median milliseconds of CPU time and of elapsed time of a query. Every query of `QUERIES` is
    asked `rounds` times, after one round that is not counted. `mode` is "semantic", "lexical" or "hybrid".
    """
    session = Session(Project(folder), mode)  # type: ignore[arg-type]
    used, elapsed = [], []
    for number in range((rounds + 1) * len(QUERIES)):
        began, cpu = time.perf_counter(), time.process_time()
        session.searcher.search(QUERIES[number % len(QUERIES)], session.mode)
        used.append(time.process_time() - cpu)
        elapsed.append(time.perf_counter() - began)
    return tuple(1e3 * statistics.median(each[len(QUERIES) :]) for each in (used, elapsed))  # type: ignore[return-value]


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.option("--rounds", default=4, show_default=True)
def main(folder: Path, rounds: int) -> None:
    for mode in ("lexical", "semantic", "hybrid"):
        used, elapsed = measure(folder, mode, rounds)
        click.echo(f"{mode:9} {used:6.1f} ms of CPU time, {elapsed:6.1f} ms elapsed")


if __name__ == "__main__":
    main()
