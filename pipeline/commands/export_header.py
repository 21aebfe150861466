"""The metadata of an exported adapter, with the keys of this program, of PEFT, of kohya and of Stability's modelspec."""

from __future__ import annotations

import json
import re
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from typing import Any

NETWORKS = {"lora": "networks.lora", "dora": "networks.lora", "lokr": "lycoris.kohya"}  # variant -> kohya's ss_network_module


def header(about: dict[str, str], style: str, dtype: str, ranks: dict[str, int], variant: str) -> dict[str, str]:
    """Field -> text, as safetensors requires. `ranks`: name of a Linear in the file -> rank; `variant`: a key of `NETWORKS`."""
    fields = {**_own_fields(about, style, dtype), **_common_fields(about, ranks, variant)}
    if style == "diffusers" and variant != "lokr":  # diffusers reads the settings of a LoKr from its shapes
        settings = _peft_config({name.removeprefix("transformer."): rank for name, rank in ranks.items()}, variant)
        fields["lora_adapter_metadata"] = json.dumps(settings)
    return fields


def _own_fields(about: dict[str, str], style: str, dtype: str) -> dict[str, str]:
    # Entries that do not hold for the exported file, such as the scales, stay behind.
    kept = {key: str(value) for key, value in about.items() if key not in ("format", "lora_adapter_metadata", "scales")}
    written = {"export_style": style, "export_dtype": dtype, "scale": "folded into the arrays", "software": _software()}
    return {**kept, **written, "format": "pt"}


def _common_fields(about: dict[str, str], ranks: dict[str, int], variant: str) -> dict[str, str]:
    rank = str(_most_common(ranks)) if ranks else ""
    fields = {
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.implementation": "diffusers",
        "modelspec.title": about.get("project", ""),
        "modelspec.architecture": f"{about['family']}/{'lokr' if variant == 'lokr' else 'lora'}" if "family" in about else "",
        "modelspec.resolution": about.get("resolution", ""),
        "modelspec.trigger_phrase": about.get("trigger", ""),
        "ss_output_name": about.get("project", ""),
        "ss_base_model_version": about.get("family", ""),
        "ss_steps": about.get("step", ""),
        "ss_network_module": NETWORKS[variant],
        "ss_network_args": json.dumps({"algo": "lokr"}) if variant == "lokr" else "",
        "ss_network_dim": rank,
        "ss_network_alpha": rank,  # the trained alpha is folded into the arrays
    }
    return {key: str(value) for key, value in fields.items() if value}


def _peft_config(ranks: dict[str, int], variant: str) -> dict[str, Any]:
    """PEFT's LoraConfig under the prefix "transformer.", as diffusers reads it."""
    common = _most_common(ranks)
    other = {"^" + re.escape(name): rank for name, rank in ranks.items() if rank != common}
    settings = {
        "transformer.r": common,
        # Alpha equals the rank, so PEFT scales by 1: the trained scale is in the arrays.
        "transformer.lora_alpha": common,
        "transformer.rank_pattern": other,
        "transformer.alpha_pattern": dict(other),
        "transformer.target_modules": list(ranks),
    }
    return settings | {"transformer.use_dora": True} if variant == "dora" else settings


def _most_common(ranks: dict[str, int]) -> int:
    return Counter(ranks.values()).most_common(1)[0][0]


def _software() -> str:
    try:
        return f"latentmill {version('latentmill')}"
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "latentmill"
