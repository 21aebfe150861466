"""Reads weights strictly: every file complete, every key known, every shape that of the architecture, every value finite.

Weights in 8 bits or fewer are unpacked: fp8 and int8 with their scales, MLX's quantised layers, and GGUF (gguf.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from stages.kernels import Arrays
from stages.models import gguf
from stages.models.family import Family
from stages.models.folders import read_config
from stages.untrusted import open_regular, parse_json, read_json

Shapes = Mapping[str, tuple[int, ...]]
Arrange = Callable[[str, mx.array], Any]  # (name, array) -> what takes its place, such as a packed weight

PREFIXES = ("model.diffusion_model.", "diffusion_model.")  # some single files put one of them before every key
NAMED = 3  # keys that a message names; it counts the rest
MAX_HEADER = 100_000_000  # bytes; the limit of the format
BYTES = ("F8_E4M3", "F8_E5M2", "I8")  # of weights in 8 bits
# Integers and U8 occur in buffers, never in weights; U32 in layers that MLX has quantised.
DTYPES = ("BF16", "F16", "F32", "I64", "I32", "U8", "BOOL", "U32", *BYTES)
NUMPY = {
    "BF16": "<u2",
    "F16": "<f2",
    "F32": "<f4",
    "I64": "<i8",
    "I32": "<i4",
    "BOOL": "?",
    "U32": "<u4",
    "I8": "i1",
}  # others are bytes
STRETCH = 1 << 22  # values that are checked at once, so that the check takes little memory
LARGE = 500_000_000  # bytes; smaller models are read at once, and nothing is said about them

# Names of the scale of X.weight, and names that only matter for computing in 8 bits.
SCALES = ("weight_scale", "scale_weight")
UNUSED = re.compile(r"(^|\.)(input_scale|scale_input|comfy_quant|scaled_fp8)$")
OTHER = re.compile(r"\.(weight_scale_2|weight_scale_inv|qweight|qzeros|absmax|quant_map|_scale|_data)$")  # other quantisers
MLX_PARTS = ("scales", "biases")
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
GROUP = 64  # MLX's default


def strip_prefix(key: str) -> str:
    return next((key[len(p) :] for p in PREFIXES if key.startswith(p)), key)


def recognise(shapes: Shapes, family: Family) -> str:
    """transformer, autoencoder or text_encoder; "" if weights with these names and shapes fit no component of `family`."""
    named, code = {strip_prefix(name): shape for name, shape in shapes.items()}, family.architecture
    fit = {"transformer": code.is_transformer, "autoencoder": code.is_autoencoder, "text_encoder": code.is_text_encoder}
    return next((component for component, fits in fit.items() if fits(named, family)), "")


def swap_halves(rows: mx.array) -> mx.array:
    """Exchange the halves of axis 0. Raises ValueError if its length is odd."""
    if rows.shape[0] % 2:
        raise ValueError(f"{rows.shape[0]} rows have no halves to exchange")
    first, second = mx.split(rows, 2)
    return mx.concatenate([second, first])


def weight_files(path: Path) -> list[Path]:
    """Files of a component: those of its index, else all safetensors, else GGUF. Raises ValueError if one is missing."""
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
    # model.safetensors and model.fp16.safetensors differ in precision only: the name with the fewest dots counts.
    by_content: dict[str, list[Path]] = {}
    for file in found:
        by_content.setdefault(_without_variant(file), []).append(file)
    return [_plainest(files) for files in by_content.values()]


def _visible(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))


def _without_variant(path: Path) -> str:
    # model.fp16.safetensors -> model.safetensors
    stem, _, tail = path.name.partition(".")
    return stem + tail[tail.index("safetensors") :]


def _plainest(candidates: list[Path]) -> Path:
    return min(candidates, key=lambda p: (p.name.count("."), p.name))


def _shards(index: Path) -> list[Path]:
    found = read_json(index)
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index} is not an index of shards: expected a JSON object with weight_map")
    names = sorted(set(weight_map.values()))
    # Names, not paths: an index must not lead out of its folder.
    strange = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if strange:
        raise ValueError(f"{index} names {strange[0]!r:.80}: a shard must be a .safetensors file in the same folder")
    missing = [n for n in names if not (index.parent / n).is_file()]
    if missing:
        raise ValueError(f"{index.parent} lacks {_first(missing)} of the {len(names)} files that {index.name} names")
    return [index.parent / n for n in names]


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """dtype, shape and data_offsets by tensor. Raises ValueError for another format or another length than the header's."""
    from safetensors import SafetensorError, safe_open

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
    # MLX reads lazily: for a file that was cut short it returns garbage without an error.
    expected = 8 + length + end
    if size != expected:
        word = "cut short" if size < expected else "too long"
        raise ValueError(f"{path} is {word}: {size:,} bytes, its header says {expected:,}; fetch it again")
    try:
        # The library finds unknown dtypes, overlapping tensors, and sizes that do not match their shapes.
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OverflowError, ValueError) as error:
        raise ValueError(f"{path} is not a safetensors file: {' '.join(str(error).split()):.200}") from None
    return tensors


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a component as they are stored, by name, without reading one."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(path):
        if file.suffix == gguf.SUFFIX:
            shapes |= {name: entry.shape for name, entry in gguf.read_entries(file).items()}
        else:
            shapes |= {name: tuple(entry["shape"]) for name, entry in read_header(file).items()}
    return shapes


def read_file(path: Path) -> tuple[Arrays, dict[str, str]]:
    """(arrays by name, metadata), lazily. Raises ValueError if the file is missing or damaged."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    read_header(path)
    loaded: Any = mx.load(str(path), return_metadata=True)
    arrays, metadata = loaded
    return arrays, metadata


def read_tensors(path: Path) -> Arrays:
    """All tensors of a component, lazily. fp8, int8 and MLX's quantised weights are unpacked, without scales; ValueError else."""
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
        # MLX cannot read e5m2.
        loaded: Any = _bytes_of(file, header) if "F8_E5M2" in dtypes.values() else mx.load(str(file))
        arrays.update(loaded)
    return unpack(arrays, dtypes, path)


def _bytes_of(file: Path, header: Mapping[str, Mapping[str, Any]]) -> Arrays:
    data, found = np.memmap(file, np.uint8, "r"), {}
    start = 8 + int(data[:8].view("<u8")[0])
    for key, tensor in header.items():
        begin, end = tensor["data_offsets"]
        values = np.array(data[start + begin : start + end].view(NUMPY.get(tensor["dtype"], "u1"))).reshape(tensor["shape"])
        found[key] = mx.array(values).view(mx.bfloat16) if tensor["dtype"] == "BF16" else mx.array(values)
    return found


def load_component(path: Path, shapes: Shapes, *, dtype: Any = None, arrange: Arrange | None = None, **names: Any) -> Arrays:
    return evaluate_each(open_component(path, shapes, **names), dtype, arrange)


def open_component(
    path: Path,
    shapes: Shapes,
    *,
    convert: Callable[[Arrays], Arrays] | None = None,
    rename: Callable[[str], str | None] | None = None,
    ignore: Callable[[str], bool] | None = None,
) -> Arrays:
    """A component's tensors, lazily. In order: `convert(all)`, `rename(name)` (None: left out), `ignore(new name)`, the check."""
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
    old: dict[str, str] = {}
    for key in arrays:
        name = rename(key)
        if name is not None and (other := old.setdefault(name, key)) != key:
            raise ValueError(f"{where} holds {other} and {key}, two spellings of one tensor: remove one")
    return {name: arrays[key] for name, key in old.items()}


def check_shapes(arrays: Mapping[str, mx.array], shapes: Shapes, where: Path | str) -> None:
    """Raise ValueError if a tensor is missing, unknown or of another shape. `where` is for the message."""
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
    every = list(names)
    rest = len(every) - NAMED
    return ", ".join(every[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


_report: ContextVar[Callable[[int, int], None]] = ContextVar("report", default=lambda read, total: None)


@contextmanager
def reading(what: str, note: Callable[[str], None]) -> Iterator[None]:
    """Within it, `note` gets "reading the transformer: 3.1 of 7.8 GB" (sizes of unpacked tensors), and "" at the end."""
    shown = ""

    def report(read: int, total: int) -> None:
        nonlocal shown
        text = f"reading {what}: {read / 1e9:.1f} of {total / 1e9:.1f} GB"
        if total >= LARGE and text != shown:
            shown = text
            note(text)

    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)
        if shown:
            note("")


def evaluate_each(arrays: Arrays, dtype: Any, arrange: Arrange | None = None) -> Arrays:
    """Casts to `dtype` or `dtype(name)`, then `arrange(name, tensor)`. Empties `arrays`. ValueError for infinity or NaN."""
    done: Arrays = {}
    report, total, read = _report.get(), sum(value.nbytes for value in arrays.values()), 0
    for key in list(arrays):
        # Out of the dict before the cast, so that its memory is freed afterwards.
        value = arrays.pop(key)
        read += value.nbytes
        wanted = dtype(key) if callable(dtype) else dtype
        if wanted is not None and mx.issubdtype(value.dtype, mx.floating):
            value = value.astype(wanted)
        if mx.issubdtype(value.dtype, mx.floating):
            mx.eval(value)
            flat = value.reshape(-1)
            if not all(mx.isfinite(flat[at : at + STRETCH]).all().item() for at in range(0, flat.size, STRETCH)):
                raise ValueError(f"{key} has values that are infinite or not a number: the weights are damaged; fetch them again")
        if arrange:
            value = arrange(key, value)
        mx.eval(value)
        done[key] = value
        report(read, total)
    return done


def unpack(arrays: Arrays, dtypes: Mapping[str, str], path: Path) -> Arrays:
    """Tensors as floats without scales; ValueError for a stray scale. fp8 comes as uint8, `dtypes` as safetensors spells it."""
    if foreign := next((name for name in arrays if OTHER.search(name)), ""):
        raise ValueError(f"{path} is quantised in a way that is not read ({foreign}): fetch the bfloat16 or the fp8 weights")
    used: set[str] = set()
    done: Arrays = {}
    for name, value in arrays.items():
        stem = name.removesuffix(".weight")
        dtype = dtypes.get(name)
        if dtype in BYTES:
            found = [scale for part in SCALES if (scale := f"{stem}.{part}") in arrays]
            used |= set(found)
            if dtype == "I8" and not found:
                raise ValueError(f"{path}: {name} is stored in 8 bits only with {name}_scale beside it, one factor per row")
            wide = _from_bytes(value, dtype)
            done[name] = _scaled(wide, found[0], arrays[found[0]], path) if found else wide
        elif dtype == "U32" and name.endswith(".weight"):
            used |= {f"{stem}.{part}" for part in MLX_PARTS}
            done[name] = _dequantized(stem, arrays, path)
        else:
            done[name] = value
    if lone := next((name for name in done if name.endswith(SCALES) and name not in used), ""):
        raise ValueError(f"{path} holds {lone}, the scale of a weight that is not in 8 bits: use the bfloat16 or the fp8 file")
    return {name: value for name, value in done.items() if name not in used and not UNUSED.search(name)}


def _from_bytes(value: mx.array, dtype: str) -> mx.array:
    if dtype == "I8":
        return value.astype(mx.float32)
    if dtype == "F8_E4M3":
        return mx.from_fp8(value, mx.float32)
    # The five-bit exponent of e5m2 is that of float16, of which it is the upper byte.
    return mx.left_shift(value.astype(mx.uint16), mx.array(8, mx.uint16)).view(mx.float16).astype(mx.float32)


def _scaled(value: mx.array, name: str, scale: mx.array, path: Path) -> mx.array:
    rows = value.shape[0] if value.ndim else 1
    # One factor, or one per row.
    allowed = {(), (1,), (1, 1), (rows,), (rows, 1)}
    if tuple(scale.shape) not in allowed or not mx.issubdtype(scale.dtype, mx.floating):
        raise ValueError(f"{path}: {name} must be one number or one for each of {rows} rows, got {tuple(scale.shape)}")
    product: mx.array = value * scale.astype(mx.float32).reshape(-1, *[1] * (value.ndim - 1))
    return product


def _dequantized(stem: str, arrays: Arrays, path: Path) -> mx.array:
    parts = [f"{stem}.{part}" for part in ("weight", *MLX_PARTS)]
    if missing := [part for part in parts if part not in arrays]:
        raise ValueError(f"{path} lacks {missing[0]}, which a layer quantised by MLX has")
    packed, scales, biases = (arrays[part] for part in parts)
    found = read_config(path).get("quantization", {})
    # Settings of one layer go before those of the model.
    own = found.get(stem) if isinstance(found, Mapping) else None
    settings = own if isinstance(own, Mapping) else found
    if not isinstance(settings, Mapping) or settings.get("mode", "affine") != "affine":
        raise ValueError(f"{path}: quantization in config.json must be MLX's affine one, got {settings!r:.80}")
    group, bits = settings.get("group_size", GROUP), settings.get("bits", 0)  # 0: it does not state them
    if group not in GROUPS or bits not in (0, *BITS):
        raise ValueError(f"{path}: quantization must have group_size in {GROUPS} and bits in {BITS}, got {group!r} and {bits!r}")
    words, groups = packed.shape[-1], scales.shape[-1]
    bits = bits or 32 * words // max(1, groups * group)
    sound = scales.shape == biases.shape and packed.shape[:-1] == scales.shape[:-1] and packed.ndim == 2
    if not sound or bits not in BITS or 32 * words != groups * group * bits:
        raise ValueError(
            f"{path}: {stem} must be quantised by MLX in groups of {group}, got weight {tuple(packed.shape)}, "
            f"scales {tuple(scales.shape)} and biases {tuple(biases.shape)}"
        )
    return mx.dequantize(packed, scales, biases, group_size=group, bits=bits)
