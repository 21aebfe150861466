"""A pipeline of one stage that only waits: a stand-in of known cost, to measure what workers add to it."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from schemas.table import TableSchema, column
from stages.pipelines import Pipeline
from stages.run import Run
from stages.settings import Section, runtime, selects
from stages.stage import Stage

WAITS = TableSchema(
    name="waits",
    doc="One row per wait.",
    key=("number",),
    columns=(
        column("number", pa.int32(), "number of the wait"),
        column("process", pa.int32(), "process that waited", measured=True),
        column("loads", pa.int32(), "models that the process had loaded by then", measured=True),
    ),
)
_loads = itertools.count(1)


@dataclass(frozen=True)
class WaitsConfig(Section):
    count: int = selects(60, "rows")
    seconds: float = runtime(0.1, "what a row costs, seconds in which no CPU is used")


def wanted_waits(run: Run[Any]) -> pa.Table:
    return pa.table({"number": pa.array(range(run.config.count), pa.int32())})


def wait(run: Run[Any]) -> Iterator[pa.RecordBatch]:
    """Wait once for each pending row."""
    loads = run.reuse("model", lambda: next(_loads))
    for number in run.output.pending["number"].to_pylist():
        time.sleep(run.config.seconds)
        yield WAITS.record_batch([{"number": number, "process": os.getpid(), "loads": loads}])


STAGE = Stage(reads=(), writes=WAITS, config=WaitsConfig, wants=wanted_waits, run=wait)
PIPELINE = Pipeline(name="tests.bench.waiting", doc="rows that only wait", stages={"waits": "tests.bench.waiting"}, resources={})
