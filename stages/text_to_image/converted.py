"""Converted copies of a transformer: its weights as they are computed with, cast and packed, in one file of the project."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.models.family import Family, Transformer
from stages.models.folders import read_config
from stages.text_to_image.packing import Packed, packing
from stages.tuner.quantize import QuantizedWeight

if TYPE_CHECKING:
    import mlx.core as mx

FOLDER = "weights/converted"  # below the project; its files may be deleted at any time
FORM = 2  # raised when a copy is written in another way
ROOM = 1.1  # free space that a copy needs, relative to its size
PARTS = QuantizedWeight._fields
PART = 16 << 20  # bytes of a part of a file that has a digest of its own
THREADS = min(16, os.cpu_count() or 1)


def load_transformer(
    family: Family,
    path: Path,
    dtype: mx.Dtype,
    packed: Packed | None,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Transformer:
    """Load from the copy in `folder`, or from `path`, and then write the copy. `packed` None: 16 bits.

    Raises ValueError if weights are missing, damaged or of another model.
    """
    architecture = family.architecture
    pack = packing(architecture, packed) if packed else None
    if folder is None:
        return architecture.load_transformer(path, family, dtype, pack)
    if found := load_copy(family, path, dtype, packed, folder, say):
        return found
    kept: dict[str, Any] = {}

    def keep(name: str, weight: mx.array) -> Any:
        kept[name] = pack(name, weight) if pack else weight
        return kept[name]

    model = architecture.load_transformer(path, family, dtype, keep)
    _write(_copy_file(folder, path, family, dtype, packed), kept, say)
    return model


def load_copy(
    family: Family,
    path: Path,
    dtype: mx.Dtype,
    packed: Packed | None,
    folder: Path,
    say: Callable[[str], None] = lambda line: None,
) -> Transformer | None:
    """None if there is no copy. A damaged one is deleted."""
    weights = _read(_copy_file(folder, path, family, dtype, packed), say)
    if weights is None:
        return None
    return family.architecture.build_transformer(family.architecture.transformer_config(path, family), weights)


def _copy_file(folder: Path, path: Path, family: Family, dtype: mx.Dtype, packed: Packed | None) -> Path:
    return folder / f"{_key(path, family, dtype, packed)}.safetensors"


def _key(path: Path, family: Family, dtype: mx.Dtype, packed: Packed | None) -> str:
    from stages.models.weights import weight_files

    # Not by content: the point of a copy is that the original weights need not be read.
    files = [(str(each.resolve()), each.stat().st_size, each.stat().st_mtime_ns) for each in weight_files(path)]
    bits = [packed.base_bits or 16, dict(packed.base_bits_for or {})] if packed else []
    facts = [FORM, files, read_config(path), family.name, str(dtype), bits]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _digest_file(file: Path) -> Path:
    return file.with_suffix(".sha256")


def _digest(file: Path) -> str:
    """The sha256 of the sha256 digests of the file's parts, which several threads compute."""

    def part(start: int) -> bytes:
        return hashlib.sha256(os.pread(opened.fileno(), PART, start)).digest()

    with file.open("rb") as opened, ThreadPoolExecutor(THREADS) as pool:
        parts = pool.map(part, range(0, os.fstat(opened.fileno()).st_size, PART))
        return hashlib.sha256(b"".join(parts)).hexdigest()


def _read(file: Path, say: Callable[[str], None]) -> dict[str, Any] | None:
    if not file.is_file() or not _digest_file(file).is_file():
        return None
    import mlx.core as mx

    from stages.models.weights import read_file

    with ThreadPoolExecutor(1) as pool:
        digest = pool.submit(_digest, file)
        try:
            arrays, _ = read_file(file)
            mx.eval(arrays)  # while the digest is computed: both read the whole file
        except (ValueError, RuntimeError):
            arrays = {}
    if not arrays or digest.result() != _digest_file(file).read_text().strip():
        say(f"the converted copy {file.name} is damaged; it is made again")
        file.unlink()
        return None
    # Names are "weight" or, if packed, "weight:part".
    packed = {name.rpartition(":")[0] for name in arrays if ":" in name}
    found: dict[str, Any] = {name: value for name, value in arrays.items() if ":" not in name}
    return found | {name: QuantizedWeight(*(arrays[f"{name}:{part}"] for part in PARTS)) for name in packed}


def _write(file: Path, weights: Mapping[str, Any], say: Callable[[str], None]) -> None:
    import mlx.core as mx

    arrays: dict[str, mx.array] = {}
    for name, weight in weights.items():
        if isinstance(weight, QuantizedWeight):
            arrays |= {f"{name}:{part}": value for part, value in zip(PARTS, weight, strict=True)}
        else:
            arrays[name] = weight
    size = sum(value.nbytes for value in arrays.values())
    temporary = file.with_name(f".tmp-{os.getpid()}-{file.name}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(file.parent).free < ROOM * size:
            say(f"no converted copy is kept: it needs {size / 1e9:.3g} GB, more than {file.parent} has free")
            return
        mx.save_safetensors(str(temporary), arrays)
        with temporary.open("rb") as opened:
            os.fsync(opened.fileno())
        digest = _digest(temporary)
        temporary.replace(file)
        _digest_file(file).write_text(digest)
        say(f"a converted copy of {size / 1e9:.3g} GB is kept in {file.parent}; later runs load it")
    # A copy only saves time: without one, the run goes on.
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        say(f"no converted copy is kept: {' '.join(str(error).split()):.200}")
