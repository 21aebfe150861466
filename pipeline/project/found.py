"""Finds model weights on this machine by the names and shapes in the headers of files: the hub's cache, ComfyUI, Draw Things."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.project.recipe import TENSOR_SUFFIXES
from pipeline.project.weights import PARTIAL, SHARD, cache_name, tensors
from stages.models.family import TOKENIZER, Family
from stages.models.folders import locate

DEPTH = 6  # folders below a place that are searched
MOST = 5000  # files of a place that are looked at
COMFYUI = ("ComfyUI/models", "Documents/ComfyUI/models")  # below the home folder
DRAW_THINGS = "Library/Containers/com.liuliu.draw-things/Data/Documents/Models"


@dataclass(frozen=True)
class Found:
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
    groups: dict[tuple[Path, str, str], list[Path]] = {}
    for path in _files(place):
        shard = SHARD.fullmatch(path.name)
        key = (path.parent, shard[1], shard[3]) if shard else (path.parent, path.name, "")
        groups.setdefault(key, []).append(path)
    for paths in groups.values():
        if found := _component(paths, families):
            yield found
    for family in families.values():
        for blob in sorted(place.glob(f"{cache_name(family.hub)}/blobs/*.incomplete")):
            rest = "the rest" if blob.name.endswith(PARTIAL) else "it again"
            yield Found((family.name,), "download", blob, blob.stat().st_size, "", f"interrupted: the stage fetches {rest}")


def _files(place: Path) -> list[Path]:
    """The weight files below `place`, each once even if links lead to it again. Ends soon after MOST files."""
    seen: dict[Path, Path] = {}
    for folder, below, names in os.walk(place):
        if len(Path(folder).relative_to(place).parts) >= DEPTH:
            below.clear()
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in names:
            path = Path(folder) / name
            if path.suffix in TENSOR_SUFFIXES and not name.startswith(".") and path.exists():
                seen.setdefault(path.resolve(), path)
        if len(seen) > MOST:
            break
    return sorted(seen.values())


def _component(paths: Sequence[Path], families: Mapping[str, Family]) -> Found | None:
    from stages.models.weights import recognise

    shapes: dict[str, tuple[int, ...]] = {}
    values: Counter[str] = Counter()
    size, problem = sum(path.stat().st_size for path in paths), ""
    for path in paths:
        try:
            for name, shape, dtype, count in tensors(path):
                shapes[name] = shape
                values[dtype] += count
        except ValueError as error:
            problem = str(error).removeprefix(f"{path} ").removeprefix("is ").partition(":")[0]
    by_component: dict[str, list[str]] = {}
    path = paths[0] if len(paths) == 1 else paths[0].parent
    for family in families.values():
        if (component := recognise(shapes, family)) and _fits(component, path, family):
            by_component.setdefault(component, []).append(family.name)
    if not by_component:
        # A damaged file has no shapes to recognise: one that has the name of a family's file is shown with its problem.
        named = {f.name: part for f in families.values() for part, names in f.single_files.items() if paths[0].name in names}
        if not problem or not named:
            return None
        return Found(tuple(named), next(iter(named.values())), path, size, "", problem)
    component, names = next(iter(by_component.items()))
    shards = [int(shard[2]) for each in paths if (shard := SHARD.fullmatch(each.name))]  # each names their number
    lacking = f"{shards[0] - len(shards)} of {shards[0]} shards" if shards and len(shards) < shards[0] else ""
    return Found(tuple(names), component, path, size, values.most_common(1)[0][0], problem or lacking)


def _fits(component: str, path: Path, family: Family) -> bool:
    """Whether config.json, too, is that of the component: two text encoders may have the same names and shapes."""
    try:
        if component == "text_encoder":
            family.architecture.text_encoder_sizes(path, family)
    except ValueError:
        return False
    return True


def complete_roots(found: Iterable[Found], families: Mapping[str, Family]) -> Iterator[tuple[str, Path]]:
    """(family name, folder) for every folder that can be the setting `weights`: it holds all components of the family."""
    roots = {root for each in found for root in (each.path.parent, each.path.parent.parent) if not each.missing}
    for family in families.values():
        for root in sorted(roots):
            try:
                at = {component: locate(root, component, family) for component in family.folders}
            except ValueError:
                continue
            own = [each for each in found if family.name in each.families and not each.missing]
            at.pop(TOKENIZER, None)  # it has no tensors to be found by
            if all(any(each.path == path or path in each.path.parents for each in own) for path in at.values()):
                yield family.name, root
