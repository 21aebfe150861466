"""The weights of a transformer, packed (quantised) for training and drawing, and converted copies of them in one file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from stages.models.family import Architecture, Family, Transformer
from stages.models.folders import read_config
from stages.text_to_image.beneath import merging
from stages.tuner.adapters.targets import by_pattern
from stages.tuner.weights import QuantizedWeight, WeightFolder, pack_if_possible

if TYPE_CHECKING:
    import mlx.core as mx

    from stages.tuner.adapters.combine import Part

STREAMED = "streamed"  # folder of a table with the weights of blocks that stay on disk while a stage runs


class Packed(Protocol):
    @property
    def base_bits(self) -> int | None: ...  # of the blocks: 16, 8 or 4; None: 16
    @property
    def base_bits_for(self) -> Mapping[str, int] | None: ...  # other bits by pattern of Linears, the longest that matches
    @property
    def stream_blocks(self) -> bool: ...  # the blocks' weights stay on disk and are read each time


def load_transformer(
    path: Path,
    family: Family,
    dtype: mx.Dtype,
    packed: Packed,
    *,
    folder: Path | None = None,
    copies: Path | None = None,
    keep: bool = False,
    say: Callable[[str], None] = lambda line: None,
    beneath: Sequence[Part] = (),
) -> Transformer:
    """`folder`: with stream_blocks, takes the blocks' matrices in a new folder, deleted with the model. `copies`: folder of
    converted copies; that of these weights is read instead of `path`. If there is none, `keep` writes it. `beneath`: adapters
    that are merged into the weights; such weights have no copies.

    Raises ValueError if weights are missing, damaged or of another model.
    """
    if packed.stream_blocks and folder is None:
        raise ValueError("stream_blocks must be false here: there is no folder for the weights of the blocks")
    architecture = family.architecture
    stored = WeightFolder(folder) if packed.stream_blocks and folder else None
    copy = copies / f"{_key(path, family, dtype, packed)}.safetensors" if copies and not stored and not beneath else None
    if copy and (found := _read(copy, "it is made again" if keep else "the weights are read instead", say)):
        return architecture.build_transformer(architecture.transformer_config(path, family), found)
    arrange, kept = merging(beneath, arranged(architecture, packed, stored)), dict[str, Any]()

    def arrange_and_keep(name: str, weight: mx.array) -> Any:
        kept[name] = arrange(name, weight) if arrange else weight
        return kept[name]

    model = architecture.load_transformer(path, family, dtype, arrange_and_keep if copy and keep else arrange)
    if stored:
        stored.belongs_to(model)
    if copy and keep:
        _write(copy, kept, say)
    return model


def meta_transformer(path: Path | None, family: Family) -> Transformer:
    """The shapes of a transformer, whose weights are not read. `path`: None takes the sizes of `family`."""
    import mlx.core as mx

    found: Transformer = family.architecture.meta_transformer(family.architecture.transformer_config(path, family), mx.float32)
    return found


def arranged(architecture: Architecture, config: Packed, stored: WeightFolder | None) -> Callable[[str, mx.array], Any] | None:
    """What to do with a weight once it is read: pack it, and store the matrices of blocks. None: nothing."""
    packs = (config.base_bits or 16) != 16 or bool(config.base_bits_for)
    if not packs and stored is None:
        return None

    def arrange(name: str, weight: mx.array) -> Any:
        packed = pack_if_possible(weight, weight_bits(name, architecture, config)) if packs else weight
        return packed if stored is None or not architecture.in_block(name) or weight.ndim != 2 else stored.store(name, packed)

    return arrange


def weight_bits(name: str, architecture: Architecture, config: Packed) -> int:
    """16, 8 or 4 for one weight. Outside the blocks: 16, or base_bits but at least the architecture's `outside_bits`."""
    bits = config.base_bits or 16
    if not architecture.in_block(name):
        return max(bits, architecture.outside_bits) if architecture.packs_outside(name) else 16
    linear = name.removesuffix(".weight")
    return by_pattern(linear, config.base_bits_for, bits)


CONVERTED = "weights/converted"  # below the project; its files may be deleted at any time
FORM = 2  # raised when a copy is written in another way
ROOM = 1.1  # free space that a copy needs, relative to its size
PARTS = QuantizedWeight._fields
PART = 16 << 20  # bytes of a part of a file that has a digest of its own
THREADS = min(16, os.cpu_count() or 1)


def _key(path: Path, family: Family, dtype: mx.Dtype, packed: Packed) -> str:
    from stages.models.weights import weight_files

    # Not by content: the point of a copy is that the original weights need not be read.
    files = [(str(each.resolve()), each.stat().st_size, each.stat().st_mtime_ns) for each in weight_files(path)]
    bits = [packed.base_bits or 16, dict(packed.base_bits_for or {})]
    facts: list[Any] = [FORM, files, read_config(path), family.name, str(dtype), bits]
    if family.references != "shared":
        facts.append(family.references)  # which weights are loaded depends on it
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def unused_copies(folder: Path, path: Path, family: Family, readers: Iterable[tuple[mx.Dtype, Packed]]) -> list[Path]:
    """Copies in `folder`, and their digests, that none of the (dtype, settings) in `readers` loads."""
    loaded = family, family.without_references()
    used = {_key(path, each, dtype, packed) for dtype, packed in readers for each in loaded}
    return sorted(file for file in folder.glob("[!.]*") if file.stem not in used)


def _digest_file(file: Path) -> Path:
    return file.with_suffix(".sha256")


def _digest(file: Path) -> str:
    """The sha256 of the sha256 digests of the file's parts, which several threads compute."""

    def part(start: int) -> bytes:
        return hashlib.sha256(os.pread(opened.fileno(), PART, start)).digest()

    with file.open("rb") as opened, ThreadPoolExecutor(THREADS) as pool:
        parts = pool.map(part, range(0, os.fstat(opened.fileno()).st_size, PART))
        return hashlib.sha256(b"".join(parts)).hexdigest()


def _read(file: Path, instead: str, say: Callable[[str], None]) -> dict[str, Any] | None:
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
        say(f"the converted copy {file.name} is damaged and deleted; {instead}")
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
