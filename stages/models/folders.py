"""Where the components of a model lie, and their config.json.

Two layouts are known, and may be mixed: a diffusers folder (transformer/, vae/, text_encoder/, tokenizer/), and the model
makers' single files beside each other (flux-2-klein-base-4b.safetensors, ae.safetensors).
"""

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
    """Return the path of a component's weights in the folder `root`. The path is that of a folder or of a single file.
    `component` is a key of `family.folders`, such as "transformer". Raises ValueError if `root` has neither the folder
    nor the file. The message lists the names that were tried.
    """
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
    """Return the files in `root` whose name is one of `names` with a precision inserted before the suffix. For example,
    "flux-2-klein-4b-fp8.safetensors" is such a file for the name "flux-2-klein-4b.safetensors". The suffix may also be
    ".gguf". The paths are sorted. The list is empty if `root` is not a folder.
    """
    stems = [re.escape(Path(name).stem) for name in names]
    if not stems or not root.is_dir():
        return []
    wanted = re.compile(rf"({'|'.join(stems)})({PRECISION})+\.(safetensors|gguf)", re.IGNORECASE)
    return sorted(path for path in root.iterdir() if wanted.fullmatch(path.name))


def component_config(path: Path, default: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a component's config.json as a dict. It holds the sizes of the component. `path` is the
    component's folder, or a weights file beside config.json. If there is no config.json, a copy of `default` is
    returned. `default` is a dict of the same form, from the record of the model family. Raises ValueError if
    config.json does not hold a JSON object.
    """
    return read_config(path) or dict(default)


CONFIG_BYTES = 1_000_000  # the largest config.json that is read


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a component's config.json as a dict. Return {} if there is no such file. If `path` is a folder, the
    file is looked for in it. If `path` is a file, it is looked for in the same folder. Raises ValueError if the config.json does
    not hold a JSON object.
    """
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return {}
    found = read_json(file, CONFIG_BYTES)
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(found).__name__}")
    return found
