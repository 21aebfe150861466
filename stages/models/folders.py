"""Where the components of a model lie, and their config.json.

Two layouts are known, and may be mixed: a diffusers folder (transformer/, vae/, text_encoder/, tokenizer/), and the model
makers' single files beside each other (flux-2-klein-base-4b.safetensors, ae.safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.models.family import FOLDERS, Family


def locate(root: Path, component: str, family: Family) -> Path:
    """Return the path of a component's weights in the folder `root`: a subfolder, or a single file. `component` is a key of
    FOLDERS, such as "transformer". Raises ValueError if neither exists; the message gives the names that were looked for.
    """
    assert component in FOLDERS, component
    folder = root / FOLDERS[component]
    names = family.single_files.get(component, ())
    for path in (folder, *(root / name for name in names)):
        if path.exists():
            return path
    wanted = ", ".join([f"{folder.name}/", *names])
    why = "" if root.is_dir() else "; that folder does not exist"
    raise ValueError(f"the {component.replace('_', ' ')} of {family.name} is not in {root}: looked for {wanted}{why}")


def component_config(path: Path, default: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of the component at `path` (a folder or a file): the content of its config.json. Return a copy of
    `default`, the sizes in the family's record, if there is no config.json.
    """
    return read_config(path) or dict(default)


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a component's config.json as a dict; {} if there is no such file. The file is looked for in the
    folder `path`, or beside the file `path`. Raises ValueError if it does not hold a JSON object.
    """
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(found).__name__}")
    return found
