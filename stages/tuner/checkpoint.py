"""Checkpoints: one folder per kept step, complete or worth nothing.

    checkpoints/step-000250/adapter.safetensors     the adapter's float32 masters, and in the header what they are
                            adapter_ema.safetensors their average over the steps, where one is kept
                            optimizer.safetensors   the optimizer's state
                            rows.arrow              the rows of the run since the checkpoint before
                            state.json              written last: step, what else must be known, size and sha256 of the others

Every file is written whole or not at all, by the `keep` that the caller passes in; so a folder whose state.json agrees
with its files is a checkpoint, and any other is none. Files are the same bytes for the same content.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pyarrow as pa

from stages.hashing import file_sha256

Arrays = dict[str, mx.array]
Keep = Callable[[str, Callable[[Path], None]], Path]  # keep(name, write): the file below the artifacts folder

FOLDER = "checkpoints"
ADAPTER, EMA, BEST = "adapter.safetensors", "adapter_ema.safetensors", "adapter_best.safetensors"
OPTIMIZER, ROWS, STATE = "optimizer.safetensors", "rows.arrow", "state.json"
WORDS = {
    mx.float32: ("F32", np.float32),
    mx.int32: ("I32", np.int32),
    mx.int8: ("I8", np.int8),
    mx.uint8: ("U8", np.uint8),
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk that has a state.json: its step, its folder, what its state.json says."""

    step: int
    folder: Path
    state: Mapping[str, Any]

    def whole(self, *names: str) -> bool:
        """Whether these files are there with the size and sha256 that they were written with."""
        return all(self._whole(name) for name in names)

    def _whole(self, name: str) -> bool:
        written, path = self.state["files"].get(name), self.folder / name
        if not written or not path.is_file() or path.stat().st_size != written["bytes"]:
            return False
        return file_sha256(path) == str(written["sha256"])

    def arrays(self, name: str) -> Arrays:
        """The arrays of one of its files."""
        loaded: Any = mx.load(str(self.folder / name))
        mx.eval(loaded)
        return dict(loaded)

    def rows(self) -> pa.Table:
        """The rows of the run between the checkpoint before and this one."""
        with pa.ipc.open_file(pa.BufferReader((self.folder / ROWS).read_bytes())) as file:
            return file.read_all()


def found(artifacts: Path) -> list[Checkpoint]:
    """Every checkpoint with a state.json, newest first. Their files are not looked at: ask `whole`."""
    there = []
    for path in artifacts.glob(f"{FOLDER}/step-*/{STATE}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # none: it was not written by us, or damaged
            state = json.loads(path.read_text())
            there.append(Checkpoint(int(state["step"]), path.parent, {**state, "files": dict(state["files"])}))
    return sorted(there, key=lambda c: -c.step)


def save(
    keep: Keep,
    step: int,
    adapter: Arrays,
    optimizer: Arrays,
    rows: pa.Table,
    about: Mapping[str, str],
    facts: Mapping[str, Any],
    averaged: Arrays | None = None,
) -> Checkpoint:
    """Keep a checkpoint. `about` goes into the header of the adapter and of its average, `facts` into state.json."""
    inside = f"{FOLDER}/step-{step:06d}"
    header = {**about, "step": str(step)}
    written = {
        ADAPTER: keep(f"{inside}/{ADAPTER}", lambda path: write_arrays(path, adapter, header)),
        OPTIMIZER: keep(f"{inside}/{OPTIMIZER}", lambda path: write_arrays(path, optimizer, {"step": str(step)})),
        ROWS: keep(f"{inside}/{ROWS}", lambda path: write_rows(path, rows)),
    }
    if averaged is not None:
        written[EMA] = keep(f"{inside}/{EMA}", lambda path: write_arrays(path, averaged, header))
    files = {name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for name, path in written.items()}
    state = {"step": step, **facts, "files": files}
    path = keep(f"{inside}/{STATE}", lambda path: _write_text(path, json.dumps(state, indent=1, sort_keys=True)))
    return Checkpoint(step, path.parent, state)


def publish(keep: Keep, saved: Checkpoint, best: Checkpoint | None = None) -> None:
    """Copy a checkpoint's adapters to the top: the result of the run, and BEST, the adapter of another one, if there is.

    The plain adapter comes last, and says that all are there.
    """
    if best:
        keep(BEST, functools.partial(_copy, best.folder / ADAPTER))
    for name in (EMA, ADAPTER):
        if name in saved.state["files"]:
            keep(name, functools.partial(_copy, saved.folder / name))


def published(artifacts: Path) -> int | None:
    """The step of the adapter at the top; None if there is none."""
    try:
        with (artifacts / ADAPTER).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, (artifacts / ADAPTER).stat().st_size)))
        return int(header["__metadata__"]["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_published(artifacts: Path, step: int, best: int | None = None) -> bool:
    """Whether the result at the top is that of a step, and has the sizes that the checkpoints, where they are left, say."""
    kept: dict[int | None, Mapping[str, Any]] = {saved.step: saved.state["files"] for saved in found(artifacts)}
    for top, of, name in ((ADAPTER, step, ADAPTER), (EMA, step, EMA), (BEST, best, ADAPTER)):
        written, path = kept.get(of, {}).get(name), artifacts / top
        if written and not (path.is_file() and path.stat().st_size == written["bytes"]):
            return False
    return published(artifacts) == step


def prune(artifacts: Path, step: int, last: int) -> None:
    """Let the optimizer states go, but for those of the last few checkpoints up to a step. Adapters all stay.

    Checkpoints after it are those of a run that was longer: they are not what this one goes on from.
    """
    for saved in [saved for saved in found(artifacts) if saved.step <= step][max(last, 1) :]:
        (saved.folder / OPTIMIZER).unlink(missing_ok=True)


def write_arrays(path: Path, arrays: Mapping[str, mx.array], about: Mapping[str, str]) -> None:
    """A safetensors file, array by array: sorted, so that equal content is equal bytes, which no library promises.

    ValueError for values that are not finite: no reader could do anything with them.
    """
    entries: dict[str, Any] = {"__metadata__": dict(about)}
    end = 0
    for name in sorted(arrays):
        value = arrays[name]
        entries[name] = {"dtype": WORDS[value.dtype][0], "shape": list(value.shape), "data_offsets": [end, end + value.nbytes]}
        end += value.nbytes
    header = json.dumps(entries, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in sorted(arrays):
            values = np.ascontiguousarray(np.array(arrays[name]), WORDS[arrays[name].dtype][1])
            if not np.isfinite(values).all():
                raise ValueError(f"{name} has values that are not finite, and is not written; lower the learning rate")
            file.write(values.tobytes())


def write_rows(path: Path, rows: pa.Table) -> None:
    """An Arrow file."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, rows.schema) as writer:
        writer.write_table(rows)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)


def _copy(source: Path, path: Path) -> None:
    shutil.copyfile(source, path)
