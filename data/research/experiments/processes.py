"""Make the runs of an experiment in several processes. The result of each run is written to a file as soon as the run ends."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def call_all(work: Callable[[Row, str], Any], todo: Iterable[Row], workers: int) -> Iterator[Any]:
    """Call `work(row, folder)` for each row of `todo` in `workers` processes, and yield the results as the calls end. `folder`
    is a temporary folder that all calls share. An error in a call is raised here.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool,
    ):
        for ended in as_completed([pool.submit(work, row, folder) for row in todo]):
            yield ended.result()


def run_all(work: Callable[[Row, str], Row], todo: Iterable[Row], out: Path, workers: int) -> Iterator[Row]:
    """Call `work(row, folder)` for each row of `todo` in `workers` processes, and yield the results as the calls end. Each
    result is first appended to the file `out` as a line of JSON. `folder` is a temporary folder that all calls share.
    """
    for row in call_all(work, todo, workers):
        append(out, row)
        yield row


def append(out: Path, row: Row) -> None:
    """Append `row` to the file `out` as one line of JSON. The file is created if it does not exist."""
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
