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
    """Do nothing with `line`, a note for the user. This is the default value of parameters named `say`."""


def file_name(project: str, step: int | str, style: str, which: str = "last") -> str:
    """Return the name of an exported file, such as "cats-001000-average-comfyui.safetensors". `project` is the
    project's name. `step` is the training step, as a number or its digits. `style` is "diffusers", "comfyui" or
    "merged". `which` is the adapter: "last", "average" or "best". The values "last" and "diffusers" are left out, as in
    "cats-001000.safetensors".
    """
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
    """Convert the adapter file `adapter` for other programs and return the path of the new file. `family` is the
    adapter's model family. `out` is a file ending in .safetensors, or a folder. `style` is the naming of tensors,
    "diffusers" or "comfyui". `dtype` of the matrices is "float32", "bfloat16" or "float16". `metadata` has texts to add
    to the file's metadata, with keys such as "project". `say` is called with each line of notes for the user; by
    default nothing happens.

    In a folder, the file name is formed from project, step, style and kind of adapter. An earlier export of the same
    project, style and family is replaced. Raises ValueError if the new file would replace any other file. Raises
    ValueError too if a value of the adapter is not finite, or is too large for `dtype`.

    Scales are multiplied into the arrays, so that the file is right for readers that ignore metadata.
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
    """Write an adapter as the safetensors file `target` for other programs, and return `target`. `adapter` is (arrays,
    scales). `arrays` maps names such as "proj_out.lora_A.weight" to arrays. `scales` maps each Linear's name to the
    number that multiplies its change. `family` is the model family. `style` names the tensors as "diffusers" or
    "comfyui" does. `dtype` of the matrices is "float32", "bfloat16" or "float16". `about` has texts for the file's
    metadata, with keys such as "project". `say` is called with each line for the user.

    Raises ValueError if `target` exists and is no earlier export, or if a value is too large for `dtype`. An earlier
    export of the same project, style and family is replaced.
    """
    from pipeline.commands.export_header import header
    from stages.models import adapters

    arrays, scales = adapter
    converted = family.architecture.adapter_styles[style](arrays, scales)
    variant = adapters.variant(arrays)
    new_metadata = header(about, style, dtype, adapters.ranks(converted), variant)
    _check_replaced(target, new_metadata, say)
    _write(target, converted, dtype, new_metadata)
    if variant in READERS[style]:
        say(READERS[style][variant])
    return target


def check_choice(setting: str, value: str, choices: Iterable[str]) -> None:
    """Raise ValueError if `value` is not one of `choices`. The message lists `choices`. `setting` is what the message
    calls the value, such as "style".
    """
    if value not in choices:
        raise ValueError(f"{setting} must be one of {', '.join(choices)}, got {value!r}")


def _check_replaced(target: Path, metadata: dict[str, str], say: Say) -> None:
    """Raise ValueError if `target` exists and is not an earlier export of the same project, style and model family. If
    `target` is such an export, it may be replaced. `say` is then called with a line that tells from which training step
    the old file was. `metadata` is the metadata of the new file.
    """
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
    """Write the safetensors file `target`, completely or not at all. `arrays` maps names of tensors to MLX arrays.
    `metadata` is the metadata of the file. Matrices are cast to `dtype`, such as "bfloat16". DoRA magnitudes and alphas
    stay float32. Raises ValueError if a value is too large for `dtype`.
    """
    import mlx.core as mx

    from stages.models.adapters import EXACT, first_not_finite

    dtypes = {key: mx.float32 if key.endswith(EXACT) else getattr(mx, dtype) for key in arrays}
    cast = {key: mx.contiguous(value.astype(dtypes[key])) for key, value in arrays.items()}
    if key := first_not_finite(cast):
        raise ValueError(f"{key} has values too large for {dtype}; export as bfloat16 or float32")
    delete_abandoned(target.parent)
    with atomic_write(target) as temporary:
        temporary.touch()  # reports a folder that cannot be written as the system does; MLX would not
        mx.save_safetensors(str(temporary), cast, metadata)
