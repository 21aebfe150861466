"""Read safetensors files strictly. Every file must be complete, every key known, and every shape that of the architecture.

MLX reads safetensors lazily. For a file that was cut short it returns garbage without an error, so the size of each file is
compared with its header before MLX reads it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from stages.models import gguf
from stages.models.folders import read_config
from stages.models.packed import FP8, is_packed, unpack
from stages.models.reading import evaluate_each
from stages.untrusted import open_regular, parse_json, read_json

Arrays = dict[str, mx.array]
Shapes = Mapping[str, tuple[int, ...]]

NAMED = 3  # keys that a message names; it counts the rest
MAX_HEADER = 100_000_000  # bytes; the limit of the format
# Integers and U8 occur in buffers, never in weights; U32 in layers that MLX has quantised.
DTYPES = ("BF16", "F16", "F32", "I64", "I32", "U8", "BOOL", "U32", *FP8)
NUMPY = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "I64": "<i8", "I32": "<i4", "BOOL": "?", "U32": "<u4"}  # others are bytes


def weight_files(path: Path) -> list[Path]:
    """Return the paths of a component's safetensors files. `path` is such a file or a folder. If the folder has an
    index file, the files that the index names are returned. Otherwise, all safetensors files in the folder are
    returned. Raises ValueError if there is no file, the index is damaged, or a file in the index is missing.

    Without an index, some files may differ only in precision, such as "model.safetensors" and "model.fp16.safetensors".
    Of such files, only the file with the fewest dots in its name is returned.
    """
    if path.is_file():
        return [path]
    indices = _visible(path, "*.safetensors.index.json")
    if indices:
        return _shards(_plainest(indices))
    found = _visible(path, "*.safetensors")
    if not found and (packed := _visible(path, f"*{gguf.SUFFIX}")):
        return packed
    if not found:
        raise ValueError(f"there are no weights in {path}: looked for *.safetensors")
    by_content: dict[str, list[Path]] = {}
    for file in found:
        by_content.setdefault(_without_variant(file), []).append(file)
    return [_plainest(files) for files in by_content.values()]


def _visible(folder: Path, pattern: str) -> list[Path]:
    """Return the paths in `folder` that match a glob pattern, sorted. Paths whose names begin with a dot are left out."""
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))


def _without_variant(path: Path) -> str:
    """Return the name of the safetensors file `path` without its precision. For model.fp16.safetensors it is
    "model.safetensors".
    """
    stem, _, tail = path.name.partition(".")
    return stem + tail[tail.index("safetensors") :]


def _plainest(candidates: list[Path]) -> Path:
    """Return the path in `candidates` whose file name has the fewest dots. If several have equally few dots, the first
    of them in alphabetical order is returned.
    """
    return min(candidates, key=lambda p: (p.name.count("."), p.name))


def _shards(index: Path) -> list[Path]:
    """Return the paths of all files that a safetensors index names. Raises ValueError if the index is damaged or one of these
    files is missing.
    """
    found = read_json(index)
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index} is not an index of shards: expected a JSON object with weight_map")
    names = sorted(set(weight_map.values()))
    strange = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if strange:
        raise ValueError(f"{index} names {strange[0]!r:.80}: a shard must be a .safetensors file in the same folder")
    missing = [n for n in names if not (index.parent / n).is_file()]
    if missing:
        raise ValueError(f"{index.parent} lacks {_first(missing)} of the {len(names)} files that {index.name} names")
    return [index.parent / n for n in names]


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return the header of the safetensors file `path` without reading a tensor. It maps each tensor's name to a dict
    of "dtype", "shape" and "data_offsets". Raises ValueError if the file is no safetensors file. Raises it too if the
    file is shorter or longer than its header says.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise ValueError(f"{path} is not a whole safetensors file: {size:,} bytes, too few for its header; fetch it again")
        try:
            found = parse_json(file.read(length), "header")
            tensors: dict[str, dict[str, Any]] = {k: v for k, v in found.items() if k != "__metadata__"}
            end = max((int(v["data_offsets"][1]) for v in tensors.values()), default=0)
            if not 0 <= end < 2**63:
                raise ValueError
        except (ValueError, KeyError, AttributeError, TypeError, IndexError, OverflowError):
            raise ValueError(f"{path} is not a safetensors file: its header cannot be read") from None
    expected = 8 + length + end
    if size != expected:
        word = "cut short" if size < expected else "too long"
        raise ValueError(f"{path} is {word}: {size:,} bytes, its header says {expected:,}; fetch it again")
    _check_structure(path)
    return tensors


def _check_structure(path: Path) -> None:
    """Raise ValueError if the file `path` is not a valid safetensors file. The library safetensors does the check. It
    finds unknown dtypes, overlapping tensors, and tensors whose size does not match their shape.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OverflowError, ValueError) as error:
        raise ValueError(f"{path} is not a safetensors file: {' '.join(str(error).split()):.200}") from None


def read_keys(path: Path) -> set[str]:
    """Return the names of all tensors in a component's files, without reading a tensor. `path` is a safetensors file or a
    folder with such files.
    """
    files = weight_files(path)
    return {key for file in files for key in (gguf.read_entries(file) if file.suffix == gguf.SUFFIX else read_header(file))}


def read_file(path: Path) -> tuple[Arrays, dict[str, str]]:
    """Read the safetensors file `path` and return (arrays by name, metadata). `metadata` is a dict of texts from the
    file's header. MLX reads an array from disk when the array is first evaluated. Raises ValueError if the file is
    missing or damaged.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    read_header(path)
    loaded: Any = mx.load(str(path), return_metadata=True)
    arrays, metadata = loaded
    return arrays, metadata


def read_tensors(path: Path) -> Arrays:
    """Return all tensors of a component by name. `path` is a safetensors or GGUF file, or a folder with such files. MLX
    reads a tensor from disk when the tensor is first evaluated. Weights in fp8 and those that MLX has quantised are
    unpacked at that time; their scales are left out. Raises ValueError if a file is damaged or its quantisation is of
    another kind. Raises it too if two files contain the same name.
    """
    arrays: Arrays = {}
    dtypes: dict[str, str] = {}
    for file in weight_files(path):
        if file.suffix == gguf.SUFFIX:
            arrays |= gguf.read_gguf(file)
            continue
        header = read_header(file)
        for key, tensor in header.items():
            if key in arrays:
                raise ValueError(f"{key} is in more than one file of {path}: remove the copies")
            dtypes[key] = str(tensor.get("dtype"))
            if dtypes[key] not in DTYPES:
                raise ValueError(f"{file} is quantised: {key} is {dtypes[key]}; fetch the bfloat16 weights instead")
        loaded: Any = _bytes_of(file, header) if "F8_E5M2" in dtypes.values() else mx.load(str(file))
        arrays.update(loaded)
    return unpack(arrays, dtypes, read_config(path), path) if is_packed(dtypes) else arrays


def _bytes_of(file: Path, header: Mapping[str, Mapping[str, Any]]) -> Arrays:
    """Return all tensors of a safetensors file, as a dict from name to array. The file may contain dtypes that MLX
    cannot read. A tensor with a dtype outside of `NUMPY`, such as fp8, becomes a uint8 array of its bytes. `file` is
    the path. `header` is the result of `read_header(file)`. All data are read during this call.
    """
    data, found = np.memmap(file, np.uint8, "r"), {}
    start = 8 + int(data[:8].view("<u8")[0])
    for key, tensor in header.items():
        begin, end = tensor["data_offsets"]
        values = np.array(data[start + begin : start + end].view(NUMPY.get(tensor["dtype"], "u1"))).reshape(tensor["shape"])
        found[key] = mx.array(values).view(mx.bfloat16) if tensor["dtype"] == "BF16" else mx.array(values)
    return found


def load_component(
    path: Path,
    shapes: Shapes,
    *,
    rename: Callable[[str], str | None] | None = None,
    convert: Callable[[Arrays], Arrays] | None = None,
    dtype: Any = None,
    ignore: Callable[[str], bool] | None = None,
    arrange: Callable[[str, mx.array], mx.array] | None = None,
) -> Arrays:
    """Load a component's weights into memory, as a dict from name to array. `path` is a folder or a weights file.
    `shapes` maps the expected names to shapes. The other arguments are steps that change the tensors. They are applied
    in this order, and None skips a step: `convert(arrays)` takes the dict of all tensors and returns a new one.
    `rename(name)` returns a tensor's new name, or None to leave the tensor out. `ignore(name)` returns True to leave a
    tensor out. `dtype` is the dtype to cast to, or a function from name to dtype. `arrange(name, array)` returns the
    array that replaces a tensor.

    `convert` is for files in another layout, such as files that store several tensors as one. `ignore`, `dtype` and
    `arrange` get the new names. The shapes are checked after `ignore`, before the cast. Only floating-point tensors are
    cast. Raises ValueError if a file is damaged, or a tensor is missing, unknown, not finite or of another shape.

    Casting goes tensor by tensor, so that only one is in memory twice.
    """
    arrays = open_component(path, shapes, rename=rename, convert=convert, ignore=ignore)
    return evaluate_each(arrays, dtype, arrange)


def open_component(
    path: Path,
    shapes: Shapes,
    *,
    rename: Callable[[str], str | None] | None = None,
    convert: Callable[[Arrays], Arrays] | None = None,
    ignore: Callable[[str], bool] | None = None,
) -> Arrays:
    """Open the files of a component and return its tensors, as a dict from name to array. `path` is a folder or a
    weights file. `shapes` maps the expected names to shapes. The other arguments may be None. `convert(arrays)` returns
    all tensors in the expected layout. `rename(name)` returns a tensor's new name, or None to leave the tensor out.
    `ignore(name)` returns True to leave a tensor out. Raises ValueError if a file is damaged, or a tensor is missing,
    unknown or of another shape.

    The functions are applied in this order, and `ignore` gets the new name. `convert` takes and returns a dict from
    name to tensor. MLX reads an array from disk when the array is first evaluated.
    """
    arrays = read_tensors(path)
    if convert:
        arrays = convert(arrays)
    if rename:
        arrays = _renamed(arrays, rename, path)
    if ignore:
        arrays = {k: v for k, v in arrays.items() if not ignore(k)}
    check_shapes(arrays, shapes, path)
    return arrays


def _renamed(arrays: Arrays, rename: Callable[[str], str | None], where: Path) -> Arrays:
    """Return the tensors `arrays`, a dict by name, under new names. `rename(name)` returns the new name, or None to
    leave the tensor out. `where` is the component's path, for the message. Raises ValueError if two tensors get the
    same name.
    """
    old: dict[str, str] = {}
    for key in arrays:
        name = rename(key)
        if name is not None and (other := old.setdefault(name, key)) != key:
            raise ValueError(f"{where} holds {other} and {key}, two spellings of one tensor: remove one")
    return {name: arrays[key] for name, key in old.items()}


def check_shapes(arrays: Arrays, shapes: Shapes, where: Path) -> None:
    """Raise ValueError if a tensor is missing, unknown or of a wrong shape. `arrays` maps names to tensors. `shapes`
    maps names to the right shapes. `where` is the component's path, for the message.
    """
    missing = [k for k in shapes if k not in arrays]
    unexpected = sorted(k for k in arrays if k not in shapes)
    if missing:
        near = get_close_matches(missing[0], unexpected, n=1, cutoff=0.8)
        hint = f"; {near[0]} is there, which is unknown" if near else ""
        raise ValueError(f"{where} lacks {_first(missing)} ({len(missing)} of {len(shapes)} tensors){hint}")
    if unexpected:
        near = get_close_matches(unexpected[0], shapes, n=1, cutoff=0.8)
        hint = f"; the nearest known is {near[0]}" if near else ""
        raise ValueError(f"{where} holds {_first(unexpected)}, which the architecture does not have{hint}")
    wrong = [
        f"{k} must be {tuple(s)}, got {tuple(arrays[k].shape)}" for k, s in shapes.items() if tuple(arrays[k].shape) != tuple(s)
    ]
    if wrong:
        raise ValueError(f"{where} is of another size: {_first(wrong)}")


def _first(names: Iterable[str]) -> str:
    """Return the first 3 of `names` as text, separated by commas. If there are more, the text ends with their number,
    such as "a, b, c and 4 more".
    """
    every = list(names)
    rest = len(every) - NAMED
    return ", ".join(every[:NAMED]) + (f" and {rest} more" if rest > 0 else "")
