"""What ComfyUI and mflux make of an exported file: ComfyUI by its table of names, mflux by its own loader.

mflux needs an environment of its own. Its check runs if MFLUX_PYTHON names that environment's interpreter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.commands.text_to_image.export import STYLES, write_adapter
from stages.models.adapters import A, B
from stages.models.weights import read_file
from stages.text_to_image.families import family
from tests.pipeline.commands.text_to_image.reference import BLOCKS, tiny_transformer
from tests.pipeline.commands.text_to_image.test_export import trained

HERE = Path(__file__).parent
COMFYUI = json.loads((HERE / "comfyui_keys.json").read_text())
MFLUX = os.environ.get("MFLUX_PYTHON", "")


def exported(folder: Path, style: str) -> tuple[dict[str, np.ndarray], Path]:
    """The change of each Linear that was trained, by diffusers' names, and the exported file."""
    arrays = trained(folder / "adapter.safetensors", tiny_transformer(), BLOCKS, alpha="10")
    file = write_adapter(
        folder / "adapter.safetensors", family("tiny"), folder / "x.safetensors", style, dtype="float32", metadata={}
    )
    return {name: 2.5 * arrays[name + B] @ arrays[name + A] for name in BLOCKS}, file


def changes(file: Path) -> dict[str, np.ndarray]:
    """B A of every Linear of a file, by the name that the file has for it."""
    arrays: Any = read_file(file)[0]
    names = [key.removesuffix(A) for key in arrays if key.endswith(A)]
    assert len(arrays) == 2 * len(names)
    return {name: np.array(arrays[name + B]) @ np.array(arrays[name + A]) for name in names}


def in_comfyui(name: str) -> tuple[str, int, int]:
    """ComfyUI's reference name for a key of a file, and which share of its rows the key changes. KeyError: it ignores the key."""
    prefix = next(prefix for prefix in COMFYUI["prefixes"].values() if name.startswith(prefix))
    inside = name.removeprefix(prefix)
    number = re.search(r"\.(\d+)\.", inside)[1]
    pattern = inside.replace(f".{number}.", ".{}.", 1)
    if prefix == COMFYUI["prefixes"]["reference"]:
        assert pattern in {known for known, _, _ in COMFYUI["names"].values()}, name
        return inside, 0, 1
    known, share, shares = COMFYUI["names"][pattern]
    return known.replace("{}", number), share, shares


@pytest.mark.parametrize("style", STYLES)
def test_every_key_of_an_export_is_one_that_comfyui_knows_and_changes_the_weights_as_trained(tmp_path, style):
    expected, file = exported(tmp_path, style)
    found: dict[str, dict[int, np.ndarray]] = {}
    for name, change in changes(file).items():
        known, share, shares = in_comfyui(name)
        assert shares == 1 or set(found.get(known, {})).isdisjoint({share})
        found.setdefault(known, {})[share] = change
    fused = {known: np.concatenate([parts[share] for share in sorted(parts)]) for known, parts in found.items()}
    for name, change in expected.items():
        known, share, shares = in_comfyui(COMFYUI["prefixes"]["diffusers"] + name)
        rows = np.split(fused[known], shares)[share]
        assert np.abs(rows - change).max() < 1e-5, name


@pytest.mark.skipif(not MFLUX, reason="MFLUX_PYTHON names no interpreter with mflux")
@pytest.mark.parametrize("style", STYLES)
def test_mflux_loads_the_export_and_merges_the_change_as_trained(tmp_path, style):
    expected, file = exported(tmp_path, style)
    command = [MFLUX, str(HERE / "mflux_loader.py"), str(file), str(tmp_path / "merged.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    merged: Any = read_file(tmp_path / "merged.safetensors")[0]
    for name, change in expected.items():
        weight = np.array(merged[name.removesuffix(".0") + ".weight" if name.endswith("to_out.0") else name + ".weight"])
        assert np.abs(weight - change).max() < 1e-5, name
