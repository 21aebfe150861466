"""Where the weights of each model component of a project lie: in one folder for all, or in a place of their own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.project import hub
from pipeline.project.paths import from_home
from stages.models.family import ModelFamily

if TYPE_CHECKING:
    from pipeline.project.config import ProjectConfig

TOKENIZER_FILES = ("tokenizer.json", "merges.txt")


def find(settings: ProjectConfig, project: Path, family: ModelFamily, name: str, *, fetch: bool) -> Path:
    """The folder or file of a component's weights, fetched or generated if `fetch` allows it.

    Raises NotFetched, or ValueError if they cannot be found or are those of another component.
    """
    from stages.models.folders import locate

    given = (settings.components or {}).get(name)
    if given is None:
        return locate(hub.resolve(settings.weights, project, family, (name,), fetch=fetch), name, family)
    key = f"project.components.{name}"
    path = project / from_home(given)
    if not given or not path.exists():
        if not given or not hub.HUB_ID.fullmatch(given):
            raise ValueError(f"{key} must be a folder, a file or a hub id (org/name), got {given!r}: {path} does not exist")
        path = hub.resolve_component(given, family, name, key, fetch=fetch)
    found = path if path.is_file() or _holds(path, name) else locate(path, name, family)
    _check_kind(found, name, family, key)
    return found


def _holds(folder: Path, name: str) -> bool:
    """Whether the files of the component lie directly in `folder`."""
    if name == hub.TOKENIZER:
        return any((folder / file).is_file() for file in TOKENIZER_FILES)
    weights = any(path.suffix in (".safetensors", ".gguf") for path in folder.iterdir())
    return weights and (folder / "config.json").is_file()


def _check_kind(path: Path, name: str, family: ModelFamily, key: str) -> None:
    """Raises ValueError if the names and shapes of the tensors are those of another component."""
    from stages.models import gguf
    from stages.models.weights import read_header, weight_files

    recognise = None if name == hub.TOKENIZER else getattr(family.architecture, "recognise", None)
    if recognise is None:
        return
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(path):
        if file.suffix == gguf.SUFFIX:
            shapes |= {tensor: entry.shape for tensor, entry in gguf.read_entries(file).items()}
        else:
            shapes |= {tensor: tuple(entry["shape"]) for tensor, entry in read_header(file).items()}
    # Weights that are not recognised pass: loading them reports each wrong tensor.
    kind = recognise(shapes, family)
    if kind and kind != name:
        raise ValueError(f"{key} must be the {name.replace('_', ' ')}, got {path}: it holds the {kind.replace('_', ' ')}")
