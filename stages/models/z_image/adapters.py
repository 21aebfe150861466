"""The names of Z-Image's Linears in adapter files, and its adapters in ComfyUI's names.

Most trainers write diffusers' names with a prefix. ComfyUI's own file has q, k and v as one Linear; some adapters do too.
"""

from __future__ import annotations

from pathlib import Path

from stages.kernels import Arrays
from stages.models import adapter_files, adapters
from stages.models.adapters import DORA_SCALE, MAGNITUDE, Scales
from stages.models.z_image.load import FUSED, INSIDE, PARTS
from stages.models.z_image.transformer import KINDS

LINEARS = (*PARTS, "attention.to_out.0", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "adaLN_modulation.0")
BLOCKS = tuple(f"{kind}.{{}}." for kind in KINDS)
OUT = "attention.out"
REFERENCE: dict[str, tuple[str, ...]] = {
    **{f"{block}{FUSED}": tuple(block + part for part in PARTS) for block in BLOCKS},
    **{f"{block}{OUT}": (block + INSIDE[OUT],) for block in BLOCKS},
}
_UNDERSCORED = {name.replace(".", "_"): name for name in (*REFERENCE, *(block + name for block in BLOCKS for name in LINEARS))}

NAMES = adapter_files.Names(
    model="Z-Image", reference=REFERENCE, underscored={"lora_unet_": _UNDERSCORED, "lycoris_": _UNDERSCORED}
)


def read_adapter(path: Path) -> tuple[Arrays, Scales]:
    return adapter_files.read(path, NAMES)


def to_comfyui(arrays: Arrays, scales: Scales) -> Arrays:
    """diffusers' names, which ComfyUI maps to parts of its own Linears, after its prefix; scales multiplied in."""
    out: Arrays = {}
    for name in adapters.linears(arrays):
        own = adapter_files.scaled(arrays, scales, name)
        if MAGNITUDE in own:
            own[DORA_SCALE] = own.pop(MAGNITUDE)[:, None]  # ComfyUI would lay a plain vector along the inputs
        out |= {f"diffusion_model.{name}{ending}": value for ending, value in own.items()}
    return out
