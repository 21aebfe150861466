"""The names of FLUX 3's Linears in adapter files, and its adapters in ComfyUI's names, which are Black Forest Labs'."""

from __future__ import annotations

from pathlib import Path

from stages.kernels import Arrays
from stages.models import adapter_files
from stages.models.adapters import Scales
from stages.models.flux3.load import REFERENCE, SWAPPED

_OURS = {ours: name for name, (ours,) in REFERENCE.items()}
_UNDERSCORED = {name.replace(".", "_"): name for name in (*REFERENCE, *_OURS)}

NAMES = adapter_files.Names(
    model="FLUX 3", reference=REFERENCE, underscored={"lora_unet_": _UNDERSCORED, "lycoris_": _UNDERSCORED}, swapped=SWAPPED
)


def read_adapter(path: Path) -> tuple[Arrays, Scales]:
    return adapter_files.read(path, NAMES)


def to_comfyui(arrays: Arrays, scales: Scales) -> Arrays:
    """Black Forest Labs' names after ComfyUI's prefix; scales multiplied in. diffusers reads them too."""
    return adapter_files.to_comfyui(arrays, scales, _OURS)
