"""Run one case in a process of its own, so that no case depends on the memory or the caches of another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tests.bench.cases import UNFUSED

LIMIT_S = 180  # compiling the kernels of a first step takes a minute at most, loading dev another half


def run_isolated(
    case: Any,
    limit_s: float = LIMIT_S,
    environment: Mapping[str, str] | None = None,
    module: Sequence[str] = ("tests.bench.run",),
) -> dict[str, Any]:
    """Measure a case, a dataclass, in a subprocess of `module` and return its row. A failure or a timeout is a row with the
    column `error`.

    `environment` adds variables that are not set yet. After `limit_s` seconds the subprocess and everything that it
    started is killed.
    """
    command = [sys.executable, "-m", *module, json.dumps(asdict(case))]
    variables = {**(environment or {}), **os.environ, **(UNFUSED if getattr(case, "unfused", False) else {})}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=variables, stdout=pipe, stderr=pipe, text=True, process_group=0) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return asdict(case) | {"error": f"stopped after {limit_s:g} s"}
    if process.returncode:
        return asdict(case) | {"error": (err.strip().splitlines() or [f"exit {process.returncode}"])[-1]}
    row: dict[str, Any] = json.loads(out.splitlines()[-1])
    return row
