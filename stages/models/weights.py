"""Weights from disk, strictly: every file whole, every key known, every shape as the architecture has it.

MLX reads safetensors lazily and returns garbage, without an error, for a file cut short; so each file's size is
compared with its header before MLX sees it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import mlx.core as mx

from stages.models.family import FOLDERS, Family

NAMED = 3  # keys named in a message; the rest is counted
AUTOENCODER_FILES = ("ae.safetensors", "flux2-vae.safetensors")  # names of the autoencoder as one file
MAX_HEADER = 100_000_000  # bytes; the format's own limit
DTYPES = ("BF16", "F16", "F32", "I64", "I32", "U8", "BOOL")  # U8 and the integers are buffers, never weights


def locate(root: Path, component: str, family: Family) -> Path:
    """Where a component lies below `root`: a folder, or a single file. A ValueError says what was looked for."""
    assert component in FOLDERS, component
    folder = root / FOLDERS[component]
    names = {"transformer": family.single_files, "autoencoder": AUTOENCODER_FILES}.get(component, ())
    for path in (folder, *(root / name for name in names)):
        if path.exists():
            return path
    looked = ", ".join([f"{folder.name}/", *names])
    why = "" if root.is_dir() else "; that folder does not exist"
    raise ValueError(f"the {component.replace('_', ' ')} of {family.name} is not in {root}: looked for {looked}{why}")


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of a component's folder, or the one beside a file; {} if there is none."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} should hold a JSON object")
    return found


def files(path: Path) -> list[Path]:
    """The .safetensors files of a component: a file is itself; a folder's index, where there is one, names its shards."""
    if path.is_file():
        return [path]
    indices = sorted(path.glob("*.safetensors.index.json"))
    if indices:
        return _shards(_preferred(indices))
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise ValueError(f"there are no weights in {path}: looked for *.safetensors")
    return [_preferred(found)] if len({_plain(f) for f in found}) < len(found) else found


def _plain(path: Path) -> str:
    """A file's name without its variant: model.fp16.safetensors is another copy of model.safetensors."""
    stem, _, tail = path.name.partition(".")
    return stem + tail[tail.index("safetensors") :]


def _preferred(candidates: list[Path]) -> Path:
    """Of several variants of the same weights, the one without a variant in its name."""
    return min(candidates, key=lambda p: (p.name.count("."), p.name))


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(f"{index} is not an index of shards: expected a JSON object with weight_map") from None
    missing = [n for n in names if not (index.parent / n).is_file()]
    if missing:
        raise ValueError(f"{index.parent} lacks {_some(missing)} of the {len(names)} files that {index.name} names")
    return [index.parent / n for n in names]


def header(path: Path) -> dict[str, dict[str, Any]]:
    """A safetensors file's tensors: key -> dtype, shape, data_offsets. Refuses a file whose size the header contradicts."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise ValueError(f"{path} is not a whole safetensors file: {size:,} bytes, too few for its header")
        try:
            found = json.loads(file.read(length))
            tensors = {k: v for k, v in found.items() if k != "__metadata__"}
            end = max((v["data_offsets"][1] for v in tensors.values()), default=0)
        except (ValueError, KeyError, AttributeError, TypeError, IndexError):
            raise ValueError(f"{path} is not a safetensors file: its header cannot be read") from None
    expected = 8 + length + end
    if size != expected:
        word = "cut short" if size < expected else "too long"
        raise ValueError(f"{path} is {word}: {size:,} bytes, its header says {expected:,}; fetch it again")
    return tensors


def keys(path: Path) -> set[str]:
    """Every key of a component's files, without reading a tensor."""
    return {key for file in files(path) for key in header(file)}


def read(path: Path) -> dict[str, mx.array]:
    """Every tensor of a component, lazily: nothing is read from disk until it is evaluated."""
    arrays: dict[str, mx.array] = {}
    for file in files(path):
        for key, tensor in header(file).items():
            if key in arrays:
                raise ValueError(f"{key} is in more than one file of {path}: remove the copies")
            if str(tensor.get("dtype")) not in DTYPES:
                raise ValueError(f"{file} is quantised: {key} is {tensor.get('dtype')}; fetch the bfloat16 weights instead")
        loaded: Any = mx.load(str(file))
        arrays.update(loaded)
    return arrays


def load_component(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    rename: Callable[[str], str] | None = None,
    convert: Callable[[dict[str, mx.array]], dict[str, mx.array]] | None = None,
    dtype: Any = None,
    ignore: Callable[[str], bool] | None = None,
    arrange: Callable[[str, mx.array], mx.array] | None = None,
) -> dict[str, mx.array]:
    """Every tensor that `shapes` names, in its shape, read from a file or folder; anything else there is an error.

    `rename` turns a file's key into ours; `convert` turns a whole foreign layout into ours, lazily; keys that
    `ignore` answers True for (ours, after renaming) are left out. `dtype` (one for all, or a function of the key)
    casts and `arrange` rearranges tensor by tensor, after the shapes were checked, so that only one is held twice.
    """
    arrays = read(path)
    if convert:
        arrays = convert(arrays)
    if rename:
        arrays = {rename(k): v for k, v in arrays.items()}
    if ignore:
        arrays = {k: v for k, v in arrays.items() if not ignore(k)}
    check(arrays, shapes, path)
    return settle(arrays, dtype, arrange)


def check(arrays: Mapping[str, mx.array], shapes: Mapping[str, tuple[int, ...]], where: Path) -> None:
    """Refuse, in one line, keys that are missing or unexpected and shapes that differ."""
    missing = [k for k in shapes if k not in arrays]
    unexpected = sorted(k for k in arrays if k not in shapes)
    if missing:
        near = get_close_matches(missing[0], unexpected, n=1, cutoff=0.8)
        hint = f"; {near[0]} is there, which is unknown" if near else ""
        raise ValueError(f"{where} lacks {_some(missing)} ({len(missing)} of {len(shapes)} tensors){hint}")
    if unexpected:
        near = get_close_matches(unexpected[0], shapes, n=1, cutoff=0.8)
        hint = f"; the nearest known is {near[0]}" if near else ""
        raise ValueError(f"{where} holds {_some(unexpected)}, which the architecture does not have{hint}")
    wrong = [f"{k} is {tuple(arrays[k].shape)}, not {tuple(s)}" for k, s in shapes.items() if tuple(arrays[k].shape) != tuple(s)]
    if wrong:
        raise ValueError(f"{where} is of another size: {_some(wrong)}")


def settle(
    arrays: dict[str, mx.array],
    dtype: Any = None,
    arrange: Callable[[str, mx.array], mx.array] | None = None,
) -> dict[str, mx.array]:
    """Read, cast and rearrange tensor by tensor. Empties `arrays` on the way: the source of a cast is let go at once."""
    done: dict[str, mx.array] = {}
    for key in list(arrays):
        value = arrays.pop(key)
        wanted = dtype(key) if callable(dtype) else dtype
        if wanted is not None and mx.issubdtype(value.dtype, mx.floating):
            value = value.astype(wanted)
        if arrange:
            value = arrange(key, value)
        mx.eval(value)
        done[key] = value
    return done


def _some(names: Iterable[str]) -> str:
    """The first few, and how many more."""
    every = list(names)
    rest = len(every) - NAMED
    return ", ".join(every[:NAMED]) + (f" and {rest} more" if rest > 0 else "")
