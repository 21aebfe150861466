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


def run_all(work: Callable[[Row, str], Row], todo: Iterable[Row], out: Path, workers: int) -> Iterator[Row]:
    """Call `work(row, folder)` for each row of `todo` in worker processes, and yield the results as the calls end.
    `workers` is the number of processes. `folder` is a temporary folder that all calls share. Each result is also appended
    to the file `out` as a line of JSON.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        out.open("a") as file,
        ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool,
    ):
        for ended in as_completed([pool.submit(work, row, folder) for row in todo]):
            row = ended.result()
            file.write(json.dumps(row) + "\n")
            file.flush()
            yield row
