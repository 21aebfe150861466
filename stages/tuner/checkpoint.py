"""Checkpoints: one folder per saved step, and the result of a run.

    checkpoints/step-000250/adapter.safetensors     the adapter's float32 arrays; the header describes them
                            adapter_ema.safetensors their average over the steps, with [train.ema]
                            optimizer.safetensors   the optimizer's state
                            rows.arrow              the rows of the run since the previous checkpoint
                            state.json              written last: step, memory plan, size and sha256 of the other files
    adapter.safetensors, adapter_ema.safetensors, adapter_best.safetensors   the result: copies out of checkpoints

Every file appears whole or not at all, by the `write_artifact` that the caller passes in. A folder whose state.json agrees with
its files is a checkpoint; any other folder is ignored. Equal content is equal bytes.
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
WriteArtifact = Callable[[str, Callable[[Path], None]], Path]  # (name below the artifacts folder, write(path)) -> its path

FOLDER = "checkpoints"
ADAPTER, EMA, BEST = "adapter.safetensors", "adapter_ema.safetensors", "adapter_best.safetensors"
OPTIMIZER, ROWS, STATE = "optimizer.safetensors", "rows.arrow", "state.json"
SAFETENSORS_DTYPES = {
    mx.float32: ("F32", np.float32),
    mx.int32: ("I32", np.int32),
    mx.int8: ("I8", np.int8),
    mx.uint8: ("U8", np.uint8),
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk. `step` is the step after which it was written, and `folder` is its folder. `state` is the parsed
    content of its file `state.json`.
    """

    step: int
    folder: Path
    state: Mapping[str, Any]

    def intact(self, *names: str) -> bool:
        """Return True if all the named files of the checkpoint are undamaged. Pass the names of the files as separate
        arguments (`*names`), as in `saved.intact("adapter.safetensors", "rows.arrow")`. The size and the sha256 of each
        file are compared with the file's record in `state.json`. A file that is missing or has no record counts as
        damaged.
        """
        return all(self._intact(name) for name in names)

    def _intact(self, name: str) -> bool:
        recorded = self.state["files"].get(name)
        return bool(recorded) and not file_damage(self.folder / name, recorded)

    def arrays(self, name: str) -> Arrays:
        """Read one safetensors file of the checkpoint, such as "adapter.safetensors", and return its arrays by name."""
        loaded: Any = mx.load(str(self.folder / name))
        mx.eval(loaded)
        return dict(loaded)

    def rows(self) -> pa.Table:
        """Return the training rows between the previous checkpoint and this one, as a table. Each row is one sample of
        one step.
        """
        with pa.ipc.open_file(pa.BufferReader((self.folder / ROWS).read_bytes())) as file:
            return file.read_all()


def find_checkpoints(artifacts: Path) -> list[Checkpoint]:
    """Return the checkpoints below the folder `artifacts` of a run, newest first. A checkpoint counts if its `state.json` can be
    read. Its other files are not read: call `Checkpoint.intact` to check them.
    """
    found = []
    for path in artifacts.glob(f"{FOLDER}/step-*/{STATE}"):
        # The file may be damaged, or written by another program.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            state = json.loads(path.read_text())
            files = {n: {"bytes": int(each["bytes"]), "sha256": str(each["sha256"])} for n, each in state["files"].items()}
            found.append(Checkpoint(int(state["step"]), path.parent, {**state, "files": files}))
    return sorted(found, key=lambda c: -c.step)


def save(
    write_artifact: WriteArtifact,
    step: int,
    adapter: Arrays,
    optimizer: Arrays,
    rows: pa.Table,
    metadata: Mapping[str, str],
    facts: Mapping[str, Any],
    averaged: Arrays | None = None,
) -> Checkpoint:
    """Write the checkpoint of training step `step` and return it. `write_artifact(name, write)` creates a file by calling
    `write(path)`. `adapter` and `optimizer` (its state) map names to arrays. `rows` holds the rows of the run's table since the
    previous checkpoint. `metadata` maps keys to texts for the headers of adapter files. `facts` maps further keys of
    `state.json` to values. `averaged` is the running average of the adapter, as name -> array, or None. Raises ValueError if a
    value of an array is not finite.
    """
    inside = f"{FOLDER}/step-{step:06d}"
    header = {**metadata, "step": str(step)}
    arrays = {ADAPTER: (adapter, header), OPTIMIZER: (optimizer, {"step": str(step)})}
    if averaged is not None:
        arrays[EMA] = averaged, header
    written = {
        name: write_artifact(f"{inside}/{name}", functools.partial(write_arrays, arrays=values, metadata=about))
        for name, (values, about) in arrays.items()
    }
    written[ROWS] = write_artifact(f"{inside}/{ROWS}", functools.partial(write_rows, rows=rows))
    files = {name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for name, path in written.items()}
    state = {"step": step, **facts, "files": files}
    text = json.dumps(state, indent=1, sort_keys=True)
    return Checkpoint(step, write_artifact(f"{inside}/{STATE}", functools.partial(_write_text, text=text)).parent, state)


def publish(write_artifact: WriteArtifact, final: Checkpoint, best: Checkpoint | None = None) -> None:
    """Copy the adapter of the checkpoint `final` to the top of the artifacts folder. It is then the result of the run.
    An averaged adapter is copied too, if there is one. `best` is the checkpoint with the lowest validation loss, or
    None. Its adapter is copied as `adapter_best.safetensors`. `write_artifact(name, write)` creates a file by calling
    `write(path)`.

    `adapter.safetensors` is written last: if it exists, the result is complete.
    """
    if best:
        write_artifact(BEST, functools.partial(_copy, best.folder / ADAPTER))
    for name in (EMA, ADAPTER):
        if name in final.state["files"]:
            write_artifact(name, functools.partial(_copy, final.folder / name))


def header_metadata(path: Path) -> dict[str, str]:
    """Return the metadata in the header of the safetensors file `path`, as a dict of texts. If the file is missing or
    its header cannot be read, return {}.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, path.stat().st_size)))
        return dict(header["__metadata__"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def header_step(path: Path) -> int | None:
    """Return the training step that the header of the adapter file `path` names. Return None if the file is missing or
    its header names none.
    """
    step = header_metadata(path).get("step", "")
    return int(step) if str(step).isdecimal() else None


def published_step(artifacts: Path) -> int | None:
    """Return the training step of the adapter file that lies directly in the folder `artifacts` of a run. The step is
    read from the header of the file. Return None if the file is missing or its header gives no step.
    """
    return header_step(artifacts / ADAPTER)


def is_published(artifacts: Path, step: int, best: int | None = None) -> bool:
    """Return True if the adapter files at the top of the folder `artifacts` come from the right checkpoints. `step` is the
    training step of the checkpoint for `adapter.safetensors`. `best` is the step of the checkpoint for
    `adapter_best.safetensors`. If `best` is None, that file is not checked.

    The header of each file must name the step. The size and the sha256 of each file must be those that the checkpoint records.
    If the checkpoint of step `step` has an averaged adapter, that file is checked too. If a checkpoint no longer exists, only
    the header is checked.
    """
    recorded = {saved.step: saved.state["files"] for saved in find_checkpoints(artifacts)}
    expected = [(ADAPTER, step, ADAPTER)]
    expected += [(EMA, step, EMA)] if EMA in recorded.get(step, {}) else []
    expected += [(BEST, best, ADAPTER)] if best is not None else []
    for name, source_step, source_name in expected:
        record = recorded.get(source_step, {}).get(source_name)
        if header_step(artifacts / name) != source_step or (record and file_damage(artifacts / name, record)):
            return False
    return True


def adapter_damage(path: Path) -> str:
    """Return what is wrong with the adapter file `path` of a run, as text, or "" if nothing is. The file lies in a
    checkpoint's folder or at the top of the artifacts folder. Its sha256 is compared with that in the checkpoint's
    `state.json`. If no checkpoint records the file, the result is "".
    """
    inside = path.parent.parent.name == FOLDER
    artifacts = path.parents[2] if inside else path.parent
    step = header_step(path)
    if inside and (path.parent / STATE).is_file():
        saved = next((saved for saved in find_checkpoints(artifacts) if saved.folder == path.parent), None)
        if saved is None:
            return f"cannot be checked: {path.parent / STATE} is damaged"
    elif (artifacts / FOLDER).is_dir() and path.is_file() and step is None:
        return "is damaged: its header cannot be read"
    else:
        saved = next((saved for saved in find_checkpoints(artifacts) if saved.step == step), None)
    record = saved.state["files"].get(ADAPTER if path.name == BEST else path.name) if saved else None
    return file_damage(path, record) if record else ""


def file_damage(path: Path, record: Mapping[str, Any]) -> str:
    """Describe the damage of the file `path` in words, or return "". `record` holds the "bytes" and the "sha256" that
    it should have.
    """
    if not path.is_file():
        return "is missing"
    if path.stat().st_size != record["bytes"]:
        return f"is damaged: it has {path.stat().st_size} bytes instead of {record['bytes']}"
    return "" if file_sha256(path) == str(record["sha256"]) else "is damaged: it differs from its sha256"


def damaged_checkpoints(artifacts: Path) -> dict[int, str]:
    """Return the damaged checkpoints of a run, as a dict from training step to a description. `artifacts` is the run's
    folder. A checkpoint is damaged if a file is missing or has the wrong size, or if its `state.json` cannot be read.
    File contents are not compared.

    A folder without `state.json` counts only if a later checkpoint is readable, or if the run's own adapter is of this
    step or a later one. Otherwise an interrupted write left the folder. Optimizer states and empty folders are not
    checked.
    """
    saved = {one.step: one for one in find_checkpoints(artifacts)}
    written = max(published_step(artifacts) or 0, *saved, 0)
    problems: dict[int, str] = {}
    for folder in artifacts.glob(f"{FOLDER}/step-*"):
        digits = folder.name.removeprefix("step-")
        if not digits.isdigit() or not any(folder.iterdir()):
            continue
        step, path = int(digits), folder / STATE
        if step in saved:
            names = [name for name in saved[step].state["files"] if name != OPTIMIZER]  # old optimizer states are deleted
            bad = [name for name in names if not _has_size(folder / name, saved[step].state["files"][name])]
            problems |= {step: f"{folder / bad[0]} is missing or cut short"} if bad else {}
        elif path.exists() or step <= written:
            problems[step] = f"{path} {'is damaged' if path.exists() else 'is missing'}"
    return problems


def _has_size(path: Path, record: Mapping[str, Any]) -> bool:
    return path.is_file() and path.stat().st_size == record["bytes"]


def delete_incomplete(artifacts: Path, after: int) -> None:
    """Delete the folders of checkpoints after step `after` that have no `state.json`: their writing was interrupted.
    `artifacts` is the run's folder.
    """
    for folder in artifacts.glob(f"{FOLDER}/step-*"):
        digits = folder.name.removeprefix("step-")
        if digits.isdigit() and int(digits) > after and not (folder / STATE).exists():
            shutil.rmtree(folder)


def prune(artifacts: Path, step: int, last: int) -> None:
    """Delete the optimizer states of old checkpoints. `artifacts` is the run's folder. Only checkpoints up to and including
    step `step` are considered. The newest `last` of these checkpoints keep their optimizer states, and the optimizer states of
    the older ones are deleted. If `last` is 0, the newest one still keeps its optimizer state. Adapters are never deleted.
    """
    for saved in [saved for saved in find_checkpoints(artifacts) if saved.step <= step][max(last, 1) :]:
        (saved.folder / OPTIMIZER).unlink(missing_ok=True)


def prune_timed(artifacts: Path, step: int) -> None:
    """Delete the timed checkpoints before step `step`. A timed checkpoint is one that was written because a time
    interval had passed. `artifacts` is the folder of the run. Call this after a new timed checkpoint is written.

    The table rows of the earlier checkpoints are committed by then.
    """
    for saved in find_checkpoints(artifacts):
        if saved.state.get("timed") and saved.step < step:
            (saved.folder / STATE).unlink(missing_ok=True)  # first: a folder without it is no checkpoint
            shutil.rmtree(saved.folder, ignore_errors=True)


def write_arrays(path: Path, arrays: Mapping[str, mx.array], metadata: Mapping[str, str]) -> None:
    """Write the arrays to the safetensors file `path`, sorted by name, with `metadata` in the header. Equal content gives equal
    bytes. Raises ValueError if a value is not finite.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in sorted(arrays):
        value = arrays[name]
        dtype = SAFETENSORS_DTYPES[value.dtype][0]
        entries[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [end, end + value.nbytes]}
        end += value.nbytes
    header = json.dumps(entries, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in sorted(arrays):
            values = np.ascontiguousarray(np.array(arrays[name]), SAFETENSORS_DTYPES[arrays[name].dtype][1])
            if not np.isfinite(values).all():
                raise ValueError(f"{name} has values that are not finite, and is not written; lower the learning rate")
            file.write(values.tobytes())


def write_rows(path: Path, rows: pa.Table) -> None:
    """Write the table `rows` to the file `path` in the Arrow IPC format."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, rows.schema) as writer:
        writer.write_table(rows)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)


def _copy(source: Path, path: Path) -> None:
    shutil.copyfile(source, path)
