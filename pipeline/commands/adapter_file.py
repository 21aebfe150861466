"""Writes a trained adapter as a file that other programs load."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.store.disk import atomic_write, delete_abandoned

if TYPE_CHECKING:
    from stages.models.family import Adapter, Family

STYLES = {
    "diffusers": "transformer.<diffusers name>: diffusers, and ComfyUI by its name map",
    "comfyui": "diffusion_model.<reference name>, q, k and v fused: ComfyUI and what reads the reference layout; diffusers too",
}
DTYPES = ("float32", "bfloat16", "float16")
READERS = {  # style -> variant -> which programs load the file; every program loads a plain LoRA
    "diffusers": {
        "dora": "wrote a DoRA in PEFT's names: diffusers loads it exactly; ComfyUI ignores magnitudes, use style comfyui there",
        "lokr": "wrote a LoKr in PEFT's names: diffusers loads it, and ComfyUI by its name map",
    },
    "comfyui": {
        "dora": "wrote a DoRA with dora_scale: ComfyUI loads it, nearly exactly while it divides rows by |W| and not by |W + BA| "
        "(before its change 15458); diffusers ignores dora_scale, use style diffusers there",
        "lokr": "wrote a LoKr in LyCORIS' names: ComfyUI, LyCORIS and diffusers load it",
    },
}

Say = Callable[[str], None]


def silent(line: str) -> None:
    """The default of `say`."""


def file_name(project: str, step: int | str, style: str, which: str = "last") -> str:
    """Such as "cats-001000-average-comfyui.safetensors"; "last" and "diffusers" are left out."""
    safe = re.sub(r"[^\w.-]+", "-", project).strip("-.") or "adapter"
    kind = "".join(f"-{word}" for word, usual in ((which, "last"), (style, "diffusers")) if word != usual)
    return f"{safe}-{int(step):06d}{kind}.safetensors"


def write_adapter(
    adapter: Path,
    family: Family,
    out: Path,
    style: str,
    *,
    dtype: str,
    metadata: dict[str, str],
    say: Say = silent,
) -> Path:
    """Convert an adapter file for other programs, into a file or folder, and return the new path.

    Raises ValueError as `write_arrays` does, and if a value of the adapter is not finite.
    """
    from stages.models import adapters
    from stages.models.weights import read_file

    check_choice("style", style, STYLES)
    check_choice("dtype", dtype, DTYPES)
    arrays, scales = family.architecture.read_adapter(adapter)
    if key := adapters.first_not_finite(arrays):
        raise ValueError(f"{adapter}: {key} holds values that are not finite; the run diverged, export an earlier checkpoint")
    about = {**read_file(adapter)[1], **metadata}
    name = file_name(about.get("project", adapter.stem), about.get("step", 0), style, about.get("adapter", "last"))
    target = out if out.suffix == ".safetensors" else out / name
    return write_arrays((arrays, scales), family, target, style, dtype=dtype, about=about, say=say)


def write_arrays(
    adapter: Adapter, family: Family, target: Path, style: str, *, dtype: str, about: dict[str, str], say: Say = silent
) -> Path:
    """Write (arrays, scales) as a file in the names of `style`; matrices get `dtype`, and scales are multiplied in.

    An earlier export of the same project, style and family is replaced. Raises ValueError if `target` is any other file, or
    if a value is too large for `dtype`.
    """
    from pipeline.commands.export_header import header
    from stages.models import adapters

    arrays, scales = adapter
    # Folds the scales in: a reader that ignores metadata gets the right change.
    converted = family.architecture.adapter_styles[style](arrays, scales)
    variant = adapters.variant(arrays)
    new_metadata = header(about, style, dtype, adapters.ranks(converted), variant)
    _check_replaced(target, new_metadata, say)
    _write(target, converted, dtype, new_metadata)
    if variant in READERS[style]:
        say(READERS[style][variant])
    return target


def check_choice(setting: str, value: str, choices: Iterable[str]) -> None:
    """Raise ValueError, with `choices`, unless `value` is one of them."""
    if value not in choices:
        raise ValueError(f"{setting} must be one of {', '.join(choices)}, got {value!r}")


def _check_replaced(target: Path, metadata: dict[str, str], say: Say) -> None:
    from stages.models.weights import read_file

    if not target.exists():
        return
    try:
        _, found = read_file(target)
    except ValueError:
        found = {}
    purpose = ("project", "export_style", "family")
    if "export_style" not in found or any(found.get(key) != metadata.get(key) for key in purpose):
        kind = f"{metadata['export_style']} export of this project"
        raise ValueError(f"{target} exists and is not a {kind}; move it away or choose another name")
    say(f"replaced {target} (it held step {found.get('step', '?')})")


def _write(target: Path, arrays: dict[str, Any], dtype: str, metadata: dict[str, str]) -> None:
    import mlx.core as mx

    from stages.models.adapters import EXACT, first_not_finite

    # DoRA magnitudes and alphas stay float32.
    dtypes = {key: mx.float32 if key.endswith(EXACT) else getattr(mx, dtype) for key in arrays}
    cast = {key: mx.contiguous(value.astype(dtypes[key])) for key, value in arrays.items()}
    if key := first_not_finite(cast):
        raise ValueError(f"{key} has values too large for {dtype}; export as bfloat16 or float32")
    delete_abandoned(target.parent)
    with atomic_write(target) as temporary:
        temporary.touch()  # reports a folder that cannot be written as the system does; MLX would not
        mx.save_safetensors(str(temporary), cast, metadata)
