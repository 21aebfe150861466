"""Where the components of a model lie, and what their config.json says.

A component is a folder of the diffusers layout (transformer/, vae/) or one of the model makers' single files, also mixed.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.models.family import ModelFamily
from stages.untrusted import JSON_BYTES, open_regular, read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# What follows the name of a single file.
PRECISION = r"[-_.](fp8|e4m3fn|e5m2|scaled|fp8_?mixed|fp16|f16|bf16|fp32|q\d(_[01ksml])*)"


def locate(root: Path, component: str, family: ModelFamily) -> Path:
    """The folder or file of a component in `root`. Raises ValueError with the names that were tried."""
    assert component in family.folders, component
    folder = root / family.folders[component]
    names = family.single_files.get(component, ())
    for path in (folder, *(root / name for name in names)):
        if path.exists():
            return path
    # flux-2-klein-4b-fp8.safetensors and flux-2-klein-4b-Q4_K_M.gguf are variants of flux-2-klein-4b.safetensors.
    stems = "|".join(re.escape(Path(name).stem) for name in names)
    variant = re.compile(rf"({stems})({PRECISION})+\.(safetensors|gguf)", re.IGNORECASE)
    found = sorted(path for path in root.iterdir() if variant.fullmatch(path.name)) if stems and root.is_dir() else []
    if len(found) > 1:
        raise ValueError(f"{root} has {found[0].name} and {found[1].name}: remove one, or give it a folder of its own")
    if found:
        return found[0]
    wanted = ", ".join([f"{folder.name}/", *names])
    why = "" if root.is_dir() else "; that folder does not exist"
    raise ValueError(f"the {component.replace('_', ' ')} of {family.name} is not in {root}: looked for {wanted}{why}")


def component_config(path: Path | None, default: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes: `default` without a config.json that states some, as that of weights quantised for MLX may not."""
    found = read_config(path) if path else {}
    return found if found.keys() & default.keys() else dict(default)


def open_tokenizer(file: Path) -> Tokenizer:
    """Raises ValueError if tokenizer.json is missing, too large or damaged."""
    from tokenizers import Tokenizer

    if not file.exists():
        raise ValueError(f"{file} is missing: tokenizers are read from their tokenizer.json")
    open_regular(file, JSON_BYTES).close()
    try:
        return Tokenizer.from_file(str(file))
    except BaseException as error:  # the library raises Exception itself, and panics of its native part are no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{file} is not a tokenizer.json: {first:.300}") from None


CONFIG_BYTES = 1_000_000  # the largest config.json that is read


def read_config(path: Path) -> dict[str, Any]:
    """config.json in the folder `path` or beside the file, {} without one. Raises ValueError if it is no JSON object."""
    return read_object((path if path.is_dir() else path.parent) / "config.json", CONFIG_BYTES)


def read_object(file: Path, most: int = JSON_BYTES) -> dict[str, Any]:
    """A JSON object, {} without a file. Raises ValueError if it is anything else."""
    found = read_json(file, most) if file.exists() else {}
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(found).__name__}")
    return found


MOST = 10_000_000  # of a size without bounds of its own: no vocabulary and no width is larger
ITEMS = 16  # of a list of sizes
BOUNDS: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("num_layers", "num_single_layers", "num_hidden_layers", "n_layers", "n_refiner_layers"), (0, 1000)),
    **dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads", "num_heads", "n_heads", "n_kv_heads", "norm_num_groups"), (1, 1024)
    ),
    **dict.fromkeys(("attention_head_dim", "head_dim", "d_kv"), (1, 4096)),
    **dict.fromkeys(("eps", "rms_norm_eps", "norm_eps", "batch_norm_eps", "layer_norm_epsilon"), (1e-20, 1.0)),
    "layers_per_block": (1, 16),
    "mlp_ratio": (0.01, 100.0),
    "scaling_factor": (1e-6, 1e6),
    "shift_factor": (-1e6, 1e6),
    "rope_theta": (1.0, 1e15),
}


def checked_sizes(kind: type, content: Mapping[str, Any], where: str, model: str) -> dict[str, Any]:
    """The fields of `kind`, a dataclass, lists as tuples. ValueError if one is missing, of a wrong type or out of bounds."""
    fields = dataclasses.fields(kind)
    missing = [each.name for each in fields if each.name not in content and each.default is dataclasses.MISSING]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}; is it a {model} model?")
    fields = tuple(field for field in fields if field.name in content)
    return {field.name: _checked(str(field.type), field.name, content[field.name], where) for field in fields}


def _checked(kind: str, name: str, value: Any, where: str) -> Any:
    if value is None and "None" in kind:
        return None
    if kind.startswith("tuple"):
        if not isinstance(value, list | tuple) or not 1 <= len(value) <= ITEMS:
            raise ValueError(f"{where}: {name} must be a list of 1 to {ITEMS} sizes, got {_short(value)}")
        return tuple(_checked("int", name, item, where) for item in value)
    if kind == "bool":
        if not isinstance(value, bool):
            raise ValueError(f"{where}: {name} must be true or false, got {_short(value)}")
        return value
    low, high = BOUNDS.get(name, (1, MOST))
    numbers: tuple[type, ...] = (int,) if kind == "int" else (int, float)
    # `type`, as a bool is an int. 1e300, as isfinite raises OverflowError for a larger int.
    if type(value) not in numbers or not math.isfinite(value if abs(value) < 1e300 else math.inf) or not low <= value <= high:
        what = "a whole number" if kind == "int" else "a number"
        raise ValueError(f"{where}: {name} must be {what} from {low:g} to {high:g}, got {_short(value)}")
    return value


def _short(value: Any) -> str:
    if isinstance(value, int) and abs(value) > 10**30:
        return "a number of more than 30 digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
