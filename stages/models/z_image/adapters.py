"""The names of Z-Image's Linears in adapter files, and its adapters in ComfyUI's names.

Most trainers write diffusers' names with a prefix. ComfyUI's own file has q, k and v as one Linear; some adapters do too.
"""

from __future__ import annotations

from pathlib import Path

from stages.kernels import Arrays
from stages.models import adapter_files
from stages.models.adapters import Scales
from stages.models.z_image.load import BLOCKS, PARTS, REFERENCE

LINEARS = (*PARTS, "attention.to_out.0", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "adaLN_modulation.0")
_UNDERSCORED = {name.replace(".", "_"): name for name in (*REFERENCE, *(block + name for block in BLOCKS for name in LINEARS))}

NAMES = adapter_files.Names(
    model="Z-Image", reference=REFERENCE, underscored={"lora_unet_": _UNDERSCORED, "lycoris_": _UNDERSCORED}
)


def read_adapter(path: Path) -> tuple[Arrays, Scales]:
    return adapter_files.read(path, NAMES)


def to_comfyui(arrays: Arrays, scales: Scales) -> Arrays:
    """diffusers' names, which ComfyUI maps to parts of its own Linears, after its prefix; scales multiplied in."""
    return adapter_files.to_comfyui(arrays, scales, {})
