"""Finds model weights on this machine by the names and shapes in the headers of files: the hub's cache, ComfyUI, Draw Things."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.project.large_files import SUFFIX as PARTIAL
from stages.models.family import Family

SUFFIXES = (".safetensors", ".gguf")
SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
DEPTH = 6  # folders below a place that are searched
MOST = 5000  # files of a place that are looked at
COMFYUI = ("ComfyUI/models", "Documents/ComfyUI/models")  # below the home folder
DRAW_THINGS = "Library/Containers/com.liuliu.draw-things/Data/Documents/Models"


@dataclass(frozen=True)
class Found:
    """A model component that was found, or an interrupted download."""

    families: tuple[str, ...]  # names of those that can use it
    component: str  # such as "transformer", or "download"
    path: Path  # its file, or its folder if it has several
    size: int  # bytes
    form: str  # dtype of most of its bytes, such as "BF16"
    missing: str = ""  # what is missing or wrong


def places(home: Path | None = None) -> list[Path]:
    from huggingface_hub import constants

    start = home or Path.home()
    named = os.environ.get("COMFYUI_PATH")
    comfyui = [Path(named) / "models"] if named else [start / each for each in COMFYUI]
    return [path for path in (Path(constants.HF_HUB_CACHE), *comfyui, start / DRAW_THINGS) if path.is_dir()]


def search(place: Path, families: Mapping[str, Family]) -> Iterator[Found]:
    """The components below `place` that a family can use, and interrupted downloads."""
    groups: dict[tuple[Path, str], list[Path]] = {}
    for path in _files(place):
        shard = SHARD.fullmatch(path.name)
        groups.setdefault((path.parent, shard[1] if shard else path.name), []).append(path)
    for paths in groups.values():
        if found := _component(paths, families):
            yield found
    yield from _interrupted(place, families)


def _files(place: Path) -> list[Path]:
    """The weight files below `place`, each once even if links lead to it again. Ends soon after MOST files."""
    seen: dict[Path, Path] = {}
    for folder, below, names in os.walk(place):
        if len(Path(folder).relative_to(place).parts) >= DEPTH:
            below.clear()
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in names:
            path = Path(folder) / name
            if path.suffix in SUFFIXES and not name.startswith(".") and path.exists():
                seen.setdefault(path.resolve(), path)
        if len(seen) > MOST:
            break
    return sorted(seen.values())


def _component(paths: Sequence[Path], families: Mapping[str, Family]) -> Found | None:
    """The component in one file, or in all found shards of one. None if no family can use it."""
    shapes: dict[str, tuple[int, ...]] = {}
    values: Counter[str] = Counter()
    size, problem = sum(path.stat().st_size for path in paths), ""
    for path in paths:
        try:
            for name, shape, dtype, count in _tensors(path):
                shapes[name] = shape
                values[dtype] += count
        except ValueError as error:
            problem = str(error).removeprefix(f"{path} ").removeprefix("is ").partition(":")[0]
    by_component: dict[str, list[str]] = {}
    for family in families.values():
        if component := family.architecture.recognise(shapes, family):
            by_component.setdefault(component, []).append(family.name)
    path = paths[0] if len(paths) == 1 else paths[0].parent
    if not by_component:
        # A damaged file has no shapes to recognise: one that has the name of a family's file is shown with its problem.
        named = {f.name: part for f in families.values() for part, names in f.single_files.items() if paths[0].name in names}
        if not problem or not named:
            return None
        return Found(tuple(named), next(iter(named.values())), path, size, "", problem)
    component, names = next(iter(by_component.items()))
    return Found(tuple(names), component, path, size, values.most_common(1)[0][0], problem or _lacking(paths))


def _tensors(path: Path) -> Iterator[tuple[str, tuple[int, ...], str, int]]:
    """(name, shape, dtype, bytes) of every tensor in a file."""
    from stages.models import gguf, weights

    if path.suffix == gguf.SUFFIX:
        for name, entry in gguf.read_entries(path).items():
            yield name, entry.shape, entry.kind.name, entry.size
        return
    for name, tensor in weights.read_header(path).items():
        begin, end = tensor["data_offsets"]
        yield name, tuple(tensor["shape"]), str(tensor["dtype"]), end - begin


def _lacking(paths: Sequence[Path]) -> str:
    """Such as "1 of 4 shards"; empty if none is missing."""
    shards = [shard for path in paths if (shard := SHARD.fullmatch(path.name))]
    return (
        f"{int(shards[0][3]) - len(shards)} of {int(shards[0][3])} shards" if shards and len(shards) < int(shards[0][3]) else ""
    )


def _interrupted(place: Path, families: Mapping[str, Family]) -> Iterator[Found]:
    for family in families.values():
        for blob in sorted(place.glob(f"models--{family.hub.replace('/', '--')}/blobs/*.incomplete")):
            rest = "the rest" if blob.name.endswith(PARTIAL) else "it again"
            yield Found((family.name,), "download", blob, blob.stat().st_size, "", f"interrupted: the stage fetches {rest}")


def complete_roots(found: Iterable[Found], families: Mapping[str, Family]) -> Iterator[tuple[str, Path]]:
    """(family name, folder) for every folder that can be the setting `weights`: it holds all components of the family."""
    from stages.models.folders import locate

    roots = {root for each in found for root in (each.path.parent, each.path.parent.parent) if not each.missing}
    for family in families.values():
        for root in sorted(roots):
            try:
                places_found = [locate(root, component, family) for component in family.folders]
            except ValueError:
                continue
            own = [each for each in found if family.name in each.families and not each.missing]
            # The tokenizer is the last component, and has no tensors to be found by.
            if all(any(each.path == path or path in each.path.parents for each in own) for path in places_found[:3]):
                yield family.name, root
