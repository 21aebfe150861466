"""Run functions in forks of one process that has imported everything. A case of a sweep then costs only its own work.

The process has one thread, because it uses nothing of what it imports; so forking it is safe. The library disk.c is
preloaded. It counts the steps of a fork on the disk below a folder. It can kill the fork before a given step, refuse writes
as a full disk does, or record the steps.

    done = Forks(folder).call(function, "argument", watch=project, kill=17)
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import mmap
import os
import pkgutil
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("disk.c")
KILLED = -signal.SIGKILL  # the exit code of a killed process
FAILED = 70  # the exit code of a function that raised an exception
SECONDS = 600  # after which a fork counts as hanging
NOTES = 1 << 16  # bytes that a fork can leave in `notes`
NEVER = ("Traceback", "panicked", "RUST_BACKTRACE", ".rs:", "Fatal Python")  # in what a user sees
IMPORTED = (  # what functions import late is imported once, not in every fork
    *("duckdb", "lance", "mlx.core", "mlx.nn", "mlx.optimizers", "pyarrow.acero", "pyarrow.dataset", "pyarrow.parquet", "xxhash"),
    *("PIL.JpegImagePlugin", "PIL.PngImagePlugin", "PIL.ImageCms", "PIL.ImageOps", "encodings.utf_8_sig", "jinja2.ext"),
    *("jinja2.sandbox", "mcp.server.mcpserver", "numpy.ma", "numpy.random", "pathspec", "tokenizers", "safetensors.numpy"),
    *("rich.progress", "pipeline.cli", "pipeline.api", "pipeline.runner", "pipeline.process", "tests.pipeline.sweeps.life"),
)
WALKED = ("schemas", "stages", "pipeline.commands", "pipeline.store", "pipeline.project", "pipeline.page")
notes: mmap.mmap | None = None  # shared with the parent, so that it outlives a fork that is killed


@dataclass(frozen=True)
class Done:
    """The result of a fork."""

    code: int
    value: Any  # what the function returned
    text: str  # standard output and error
    steps: int  # on the disk
    noted: Any  # the last value passed to `note`


def note(value: Any) -> None:
    """Kept for the process that started this fork, in place of an earlier one, also if the fork is killed."""
    if notes is None:
        return
    text = json.dumps(value).encode()
    assert len(text) < NOTES - 4
    notes[4 : 4 + len(text)] = text
    notes[:4] = struct.pack("<I", len(text))


def mark(text: str) -> None:
    ctypes.CDLL(None).disk_mark(text.encode())


class Forks:
    """The process that is forked. disk.c is compiled into `folder`, which is also its cache."""

    def __init__(self, folder: Path) -> None:
        compiler, library = os.environ.get("CC", "cc").split(), folder / "disk.so"
        if not shutil.which(compiler[0]):
            pytest.skip(f"needs the C compiler {compiler[0]}: apt install gcc")
        subprocess.run([*compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl", "-lpthread"], check=True)
        words = [sys.executable, "-m", "tests.pipeline.forks"]
        environment = {**os.environ, "LD_PRELOAD": str(library), "XDG_CACHE_HOME": str(folder)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True)

    def close(self) -> None:
        self.process.communicate(timeout=SECONDS)

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        watch: Path | None = None,
        kill: int = 0,
        room: int = -1,
        record: Path | None = None,
    ) -> Done:
        """Call a function of a module in a fork, with JSON values or paths. Steps on the disk are counted below `watch` and
        appended to `record`. The fork is killed before step `kill` (0: never), and the disk is full after `room` bytes (-1:
        never).
        """
        name = f"{function.__module__}:{function.__name__}"
        order = {
            "function": name,
            "arguments": [str(each) if isinstance(each, Path) else each for each in arguments],
            "watch": str(watch.resolve()) if watch else "",
            "kill": kill,
            "room": room,
            "record": str(record or ""),
        }
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the process that is forked has ended"
        done = Done(**json.loads(answer))
        case = f"{name} {str(arguments)[:300]}: {done.code}\n{done.text}"
        assert done.code in (KILLED, 0, 1, 2) and not any(each in done.text for each in NEVER), case
        return done


def _serve() -> None:
    import stages  # noqa: F401  (before mlx.core)

    _import_all()
    gc.freeze()  # else a collection in a fork copies the pages of all that is imported
    threads = [(path / "comm").read_text().strip() for path in Path("/proc/self/task").iterdir()]
    assert set(threads) <= {threads[0], "jemalloc_bg_thd"}, f"a fork would lose threads: {threads}"
    global notes
    notes = mmap.mmap(-1, NOTES)
    steps = mmap.mmap(-1, mmap.PAGESIZE)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # only answers go to the first output
    for line in sys.stdin:
        order = json.loads(line)
        out.write(json.dumps(_fork(order, steps)) + "\n")
        out.flush()


def _import_all() -> None:
    sys.modules |= dict.fromkeys(("torch", "transformers"))  # as without extras: no stage needs them
    for name in IMPORTED:
        importlib.import_module(name)
    for package in WALKED:
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            importlib.import_module(module.name)


def _fork(order: Mapping[str, Any], steps: mmap.mmap) -> dict[str, Any]:
    """The fields of `Done`. `steps` is shared memory in which the number of steps is counted."""
    assert notes is not None
    steps[:8] = bytes(8)
    notes[:4] = bytes(4)
    with tempfile.TemporaryFile() as text, tempfile.TemporaryFile() as value:
        child = os.fork()
        if not child:
            code = FAILED
            try:
                signal.alarm(SECONDS)
                os.dup2(text.fileno(), 1)
                os.dup2(text.fileno(), 2)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                found = _call(order, steps)
                os.write(value.fileno(), json.dumps(found).encode())
                code = 0
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        value.seek(0)
        text.seek(0)
        returned = value.read()
        size = struct.unpack("<I", notes[:4])[0]
        return {
            "code": code,
            "value": json.loads(returned) if returned else None,
            "text": text.read().decode(errors="replace"),
            "steps": struct.unpack("<q", steps[:8])[0],
            "noted": json.loads(notes[4 : 4 + size]) if size else None,
        }


def _call(order: Mapping[str, Any], steps: mmap.mmap) -> Any:
    module, _, name = order["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    if order["watch"]:
        record = os.open(order["record"], os.O_WRONLY | os.O_CREAT | os.O_APPEND) if order["record"] else -1
        shared = ctypes.byref(ctypes.c_long.from_buffer(steps))
        watch = ctypes.CDLL(None).disk_watch
        watch(order["watch"].encode(), shared, ctypes.c_long(order["kill"]), ctypes.c_long(order["room"]), record)
    return function(*order["arguments"])


if __name__ == "__main__":
    # The functions that run in forks import this module by its name; both must see the same `notes`.
    sys.modules["tests.pipeline.forks"] = sys.modules["__main__"]
    _serve()
