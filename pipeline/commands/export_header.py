"""The metadata of an exported adapter, with the keys of this program, of PEFT, of kohya and of Stability's modelspec."""

from __future__ import annotations

import json
import re
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from typing import Any

NETWORKS = {"lora": "networks.lora", "dora": "networks.lora", "lokr": "lycoris.kohya"}  # variant -> kohya's ss_network_module


def header(about: dict[str, str], style: str, dtype: str, ranks: dict[str, int], variant: str) -> dict[str, str]:
    """Return the metadata of an exported adapter file: field -> text, as safetensors requires. `about` holds facts of the
    adapter: project, family, step, trigger and so on. `style` ("diffusers" or "comfyui") and `dtype` say how the file is
    written. `ranks` maps each Linear, by its name in the file, to its rank. `variant` is "lora", "dora" or "lokr".
    """
    fields = {**_own_fields(about, style, dtype), **_common_fields(about, ranks, variant)}
    if style == "diffusers" and variant != "lokr":  # diffusers reads the settings of a LoKr from its shapes
        settings = _peft_config({name.removeprefix("transformer."): rank for name, rank in ranks.items()}, variant)
        fields["lora_adapter_metadata"] = json.dumps(settings)
    return fields


def _own_fields(about: dict[str, str], style: str, dtype: str) -> dict[str, str]:
    """Return a part of an exported adapter's header, as a dict of texts. This part has the entries of `about`, and
    entries such as "export_style" that say how the file is written. `about` holds facts of the adapter, such as
    project, family and step. `style` is "diffusers" or "comfyui". `dtype` of the matrices is a name such as "bfloat16".
    Entries of `about` that do not hold for the exported file, such as "scales", are left out.
    """
    kept = {key: str(value) for key, value in about.items() if key not in ("format", "lora_adapter_metadata", "scales")}
    written = {"export_style": style, "export_dtype": dtype, "scale": "folded into the arrays", "software": _software()}
    return {**kept, **written, "format": "pt"}


def _common_fields(about: dict[str, str], ranks: dict[str, int], variant: str) -> dict[str, str]:
    """Return the fields of an exported adapter's header that other programs show, as a dict of texts. Fields such as
    "ss_steps" were introduced by kohya's training scripts. Fields such as "modelspec.title" were introduced by
    Stability AI. `about` holds facts of the adapter, such as project, family and step. `ranks` maps each Linear to its
    rank. `variant` is "lora", "dora" or "lokr". Empty fields are left out.
    """
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
    """Return the settings of an exported adapter, as a dict that diffusers reads. Its keys are settings of PEFT's
    LoraConfig after the prefix "transformer.", such as "transformer.r". `ranks` maps each Linear's name to its rank.
    `variant` is "lora" or "dora".

    Each alpha equals the rank: PEFT then scales the LoRA by 1. The trained scale is already multiplied into the arrays
    of the file.
    """
    common = _most_common(ranks)
    other = {"^" + re.escape(name): rank for name, rank in ranks.items() if rank != common}
    settings = {
        "transformer.r": common,
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
