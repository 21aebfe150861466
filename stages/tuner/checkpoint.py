"""Checkpoints: one folder per saved step, and the result of a run.

    checkpoints/step-000250/adapter.safetensors     the adapter's float32 arrays; the header describes them
                            adapter_ema.safetensors their average over the steps, with [train.ema]
                            optimizer.safetensors   the optimizer's state
                            rows.arrow              the rows of the run since the previous checkpoint
                            state.json              written last: step, memory plan, size and sha256 of the other files
    adapter.safetensors, adapter_ema.safetensors, adapter_best.safetensors   the result: copies out of checkpoints

Every file appears whole or not at all, by the `write_artifact` that the caller passes in. A folder whose state.json
agrees with its files is a checkpoint; any other folder is ignored. Equal content is equal bytes.
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
from stages.tuner.weights import Arrays
from stages.untrusted import open_regular, read_json

WriteArtifact = Callable[[str, Callable[[Path], None]], Path]  # (name below the artifacts folder, write(path)) -> its path

FOLDER = "checkpoints"
DELETED = "deleted-"  # begins the name of a folder that is being deleted
ADAPTER, EMA, BEST = "adapter.safetensors", "adapter_ema.safetensors", "adapter_best.safetensors"
OPTIMIZER, ROWS, STATE = "optimizer.safetensors", "rows.arrow", "state.json"
PASSING = {"timed", "stopped"}  # in the state of checkpoints that only the clock or a stop wrote
SAFETENSORS_DTYPES = {
    mx.float32: ("F32", np.float32),
    mx.int32: ("I32", np.int32),
    mx.int8: ("I8", np.int8),
    mx.uint8: ("U8", np.uint8),
}


def folder_name(step: int) -> str:
    return f"{FOLDER}/step-{step:06d}"


def _folders(artifacts: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all checkpoints, also of incomplete ones."""
    found = ((folder.name.removeprefix("step-"), folder) for folder in artifacts.glob(f"{FOLDER}/step-*"))
    return [(int(digits), folder) for digits, folder in found if digits.isdigit()]


@dataclass(frozen=True)
class Checkpoint:
    step: int  # after which it was written
    folder: Path
    state: Mapping[str, Any]  # the content of state.json

    def intact(self, *names: str) -> bool:
        """True if size and sha256 of these files are as recorded. A missing or unrecorded file is not intact."""
        recorded = self.state["files"]
        return all(name in recorded and not file_damage(self.folder / name, recorded[name]) for name in names)

    def whole(self, *names: str) -> bool:
        """As `intact`, by sizes alone."""
        recorded = self.state["files"]
        paths = {name: self.folder / name for name in names}
        return all(n in recorded and paths[n].is_file() and paths[n].stat().st_size == recorded[n]["bytes"] for n in names)

    def arrays(self, name: str) -> Arrays:
        loaded: Any = mx.load(str(self.folder / name))
        mx.eval(loaded)
        return dict(loaded)

    def rows(self) -> pa.Table:
        with pa.ipc.open_file(pa.BufferReader((self.folder / ROWS).read_bytes())) as file:
            return file.read_all()


def find_checkpoints(artifacts: Path) -> list[Checkpoint]:
    """Checkpoints with a readable state.json, newest first. Their other files are not looked at: see `Checkpoint.intact`."""
    found = []
    for path in artifacts.glob(f"{FOLDER}/step-*/{STATE}"):
        # The file may be damaged, or written by another program.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            state = read_json(path)
            files = {n: {"bytes": int(each["bytes"]), "sha256": str(each["sha256"])} for n, each in state["files"].items()}
            found.append(Checkpoint(int(state["step"]), path.parent, {**state, "files": files}))
    return sorted(found, key=lambda c: -c.step)


def save(
    write_artifact: WriteArtifact,
    step: int,
    adapter: Arrays,
    optimizer: Arrays,
    rows: pa.Table,  # since the previous checkpoint
    metadata: Mapping[str, str],  # for the headers of the adapter files
    facts: Mapping[str, Any],  # further entries of state.json
    averaged: Arrays | None = None,  # [train.ema]
) -> Checkpoint:
    """Raises ValueError if a value is not finite."""
    inside = folder_name(step)
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
    # Last: a folder without state.json is no checkpoint.
    text = json.dumps(state, indent=1, sort_keys=True)
    return Checkpoint(step, write_artifact(f"{inside}/{STATE}", functools.partial(_write_text, text=text)).parent, state)


def publish(write_artifact: WriteArtifact, final: Checkpoint, best: Checkpoint | None = None) -> None:
    if best:
        write_artifact(BEST, functools.partial(shutil.copyfile, best.folder / ADAPTER))
    # ADAPTER last: if it exists, the result is complete.
    for name in (EMA, ADAPTER):
        if name in final.state["files"]:
            write_artifact(name, functools.partial(shutil.copyfile, final.folder / name))


def header_metadata(path: Path) -> dict[str, str]:
    try:
        with open_regular(path) as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, path.stat().st_size)))
        return dict(header["__metadata__"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def header_step(path: Path) -> int | None:
    step = header_metadata(path).get("step", "")
    return int(step) if str(step).isdecimal() else None


def published_step(artifacts: Path) -> int | None:
    return header_step(artifacts / ADAPTER)


def is_published(artifacts: Path, step: int, best: int | None = None) -> bool:
    """True if the adapters at the top are those of these steps. Where a checkpoint is gone, only the header is compared."""
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
    """What is wrong with an adapter, in a checkpoint or at the top, in words; "" if nothing is or no checkpoint records it."""
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
        # A copy at the top: the header names the checkpoint that it was copied from.
        saved = next((saved for saved in find_checkpoints(artifacts) if saved.step == step), None)
    record = saved.state["files"].get(ADAPTER if path.name == BEST else path.name) if saved else None
    return file_damage(path, record) if record else ""


def file_damage(path: Path, record: Mapping[str, Any]) -> str:
    if not path.is_file():
        return "is missing"
    if path.stat().st_size != record["bytes"]:
        return f"is damaged: it has {path.stat().st_size} bytes instead of {record['bytes']}"
    return "" if file_sha256(path) == str(record["sha256"]) else "is damaged: it differs from its sha256"


def damaged_checkpoints(artifacts: Path) -> dict[int, str]:
    """Step -> what is wrong, in words, from file sizes alone; contents are not hashed."""
    saved = {one.step: one for one in find_checkpoints(artifacts)}
    written = max(published_step(artifacts) or 0, *saved, 0)
    problems: dict[int, str] = {}
    for step, folder in _folders(artifacts):
        path = folder / STATE
        if not any(folder.iterdir()):
            continue
        if step in saved:
            names = [name for name in saved[step].state["files"] if name != OPTIMIZER]  # old optimizer states are deleted
            sizes = {name: saved[step].state["files"][name]["bytes"] for name in names}
            bad = [name for name in names if not (folder / name).is_file() or (folder / name).stat().st_size != sizes[name]]
            problems |= {step: f"{folder / bad[0]} is missing or cut short"} if bad else {}
        # Without state.json and after everything that was written: an interrupted write, no damage.
        elif path.exists() or step <= written:
            problems[step] = f"{path} {'is damaged' if path.exists() else 'is missing'}"
    return problems


def delete_incomplete(artifacts: Path, after: int) -> None:
    """Folders of later steps whose writing was interrupted, and folders whose deletion was."""
    for step, folder in _folders(artifacts):
        if step > after and not (folder / STATE).exists():
            shutil.rmtree(folder)
    _delete_renamed(artifacts)


def prune(artifacts: Path, step: int, last: int) -> None:
    """Delete optimizer states up to `step`, except the newest `last` (at least one)."""
    for saved in [saved for saved in find_checkpoints(artifacts) if saved.step <= step][max(last, 1) :]:
        (saved.folder / OPTIMIZER).unlink(missing_ok=True)


def prune_timed(artifacts: Path, step: int) -> None:
    """Delete earlier checkpoints that were written only because time had passed. The newest one holds their rows too."""
    for saved in find_checkpoints(artifacts):
        if saved.state.get("timed") and saved.step < step:
            # Renamed first: a folder that a kill leaves half deleted must not be taken for a damaged checkpoint.
            saved.folder.rename(saved.folder.with_name(f"{DELETED}{saved.folder.name}"))
    _delete_renamed(artifacts)


def _delete_renamed(artifacts: Path) -> None:
    for folder in artifacts.glob(f"{FOLDER}/{DELETED}*"):
        shutil.rmtree(folder, ignore_errors=True)


def write_arrays(path: Path, arrays: Mapping[str, mx.array], metadata: Mapping[str, str]) -> None:
    """Raises ValueError if a value is not finite."""
    # Not mx.save_safetensors: names and header are sorted here, so that equal content is equal bytes.
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in sorted(arrays):
        value = arrays[name]
        dtype = SAFETENSORS_DTYPES[value.dtype][0]
        entries[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [end, end + value.nbytes]}
        end += value.nbytes
    header = json.dumps(entries, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    # Padded so that the arrays begin at a multiple of 8 bytes, as the safetensors library does.
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in sorted(arrays):
            values = np.ascontiguousarray(np.array(arrays[name]), SAFETENSORS_DTYPES[arrays[name].dtype][1])
            if not np.isfinite(values).all():
                raise ValueError(f"{name} has values that are not finite, and is not written; lower the learning rate")
            file.write(values.tobytes())


def write_rows(path: Path, rows: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, rows.schema) as writer:
        writer.write_table(rows)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)
