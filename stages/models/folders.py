"""Where the components of a model lie: a diffusers folder (transformer/, vae/) or the model makers' single files, also mixed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.models.family import ModelFamily
from stages.untrusted import read_json

PRECISION = (
    r"[-_.](fp8|e4m3fn|e5m2|scaled|fp8_?mixed|fp16|f16|bf16|fp32|q\d(_[01ksml])*)"  # what follows the name of a single file
)


def locate(root: Path, component: str, family: ModelFamily) -> Path:
    """The folder or file of a component in `root`. Raises ValueError with the names that were tried."""
    assert component in family.folders, component
    folder = root / family.folders[component]
    names = family.single_files.get(component, ())
    for path in (folder, *(root / name for name in names)):
        if path.exists():
            return path
    if len(found := _variants(root, names)) > 1:
        raise ValueError(f"{root} has {found[0].name} and {found[1].name}: remove one, or give it a folder of its own")
    if found:
        return found[0]
    wanted = ", ".join([f"{folder.name}/", *names])
    why = "" if root.is_dir() else "; that folder does not exist"
    raise ValueError(f"the {component.replace('_', ' ')} of {family.name} is not in {root}: looked for {wanted}{why}")


def _variants(root: Path, names: Sequence[str]) -> list[Path]:
    stems = [re.escape(Path(name).stem) for name in names]
    if not stems or not root.is_dir():
        return []
    # flux-2-klein-4b-fp8.safetensors and flux-2-klein-4b-Q4_K_M.gguf are variants of flux-2-klein-4b.safetensors.
    wanted = re.compile(rf"({'|'.join(stems)})({PRECISION})+\.(safetensors|gguf)", re.IGNORECASE)
    return sorted(path for path in root.iterdir() if wanted.fullmatch(path.name))


def component_config(path: Path, default: Mapping[str, Any]) -> dict[str, Any]:
    """Content of the component's config.json, else a copy of `default`."""
    return read_config(path) or dict(default)


CONFIG_BYTES = 1_000_000  # the largest config.json that is read


def read_config(path: Path) -> dict[str, Any]:
    """config.json in the folder `path` or beside the file, {} without one. Raises ValueError if it is no JSON object."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return {}
    found = read_json(file, CONFIG_BYTES)
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(found).__name__}")
    return found
