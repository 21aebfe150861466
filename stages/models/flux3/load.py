"""Load the transformer, from all layouts that diffusers, Black Forest Labs, flux3-mlx and mflux write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from stages.kernels import Arrays
from stages.models import adapter_files, names, weights
from stages.models.family import Family
from stages.models.flux3.transformer import HEADS, JOINT, MODULATIONS, STREAMS, Flux3, Flux3Config
from stages.models.folders import component_config

# diffusers' name -> Black Forest Labs' name; then the other way round. Source: diffusers' single_file_utils.py: a test compares.
BLOCKS = {head: f"content_{head}" if head.startswith("mode") else head for head in HEADS.values()} | {JOINT: "single_blocks"}
INSIDE = {
    "q_proj": "attn.to_q",
    "k_proj": "attn.to_k",
    "v_proj": "attn.to_v",
    "attn_out": "attn.to_out.0",
    "norm.query_norm": "attn.norm_q",
    "norm.key_norm": "attn.norm_k",
    "mlp_in": "ff.linear_in",
    "mlp_out": "ff.linear_out",
}
TIMES = {"time_in": "timestep_embedder", "ref_time_in": "target_timestep_embedder"}
SWAPPED = "final_layer.image.adaLN_modulation.1"  # its rows are shift, scale; in diffusers' norm_out scale, shift
REFERENCE: names.Reference = {
    **{f"emb_in.{each}": (f"x_embedders.{each}",) for each in STREAMS.values() if each != "txt"},
    "txt_in": ("context_embedder",),
    **{f"{theirs}.in_layer": (f"{ours}.linear_1",) for theirs, ours in TIMES.items()},
    **{f"{theirs}.out_layer": (f"{ours}.linear_2",) for theirs, ours in TIMES.items()},
    **{f"{each}.{stream}.lin": (f"{each}.{stream}.linear",) for each in MODULATIONS for stream in STREAMS.values()},
    **{f"{theirs}.{{}}.{n}": (f"{ours}.{{}}.{part}",) for ours, theirs in BLOCKS.items() for n, part in INSIDE.items()},
    SWAPPED: ("norm_out.linear",),
    "final_layer.image.linear": ("proj_out",),
}
MFLUX: names.Reference = {f"{head}.{{}}.attn.to_out": (f"{head}.{{}}.attn.to_out.0",) for head in BLOCKS}  # models that it saves
SPELLINGS = {**REFERENCE, **MFLUX}
MAKERS = {ours: name for name, (ours,) in REFERENCE.items()}  # diffusers' name -> Black Forest Labs'
NAMES = adapter_files.Names("FLUX 3", SPELLINGS, SWAPPED)
UNUSED = "repa_projectors."  # in some single files, for training alone
DISTILLED = ("ref_time_in.", "target_timestep_embedder.")


def to_diffusers(arrays: Arrays) -> Arrays:
    """From the names of diffusers, Black Forest Labs, flux3-mlx or mflux. An unknown name loses its prefix only."""
    kept = {key: value for key, value in arrays.items() if not weights.strip_prefix(key).startswith(UNUSED)}
    return names.to_diffusers(kept, SPELLINGS, SWAPPED)


def transformer_config(path: Path | None, family: Family) -> Flux3Config:
    """From the config.json at `path`, else from `family`. Raises ValueError if it is not that of a FLUX 3 transformer."""
    found = Flux3Config.from_dict(component_config(path, family.transformer))
    if found.flow_map != family.transformer["flow_map"]:
        kinds = ("a base", "distilled")[:: -1 if found.flow_map else 1]
        raise ValueError(f"{path} is {kinds[0]} (flow_map), and {family.name} is {kinds[1]}: choose the other family")
    return replace(found, references=family.references != "none")


def load_transformer(
    path: Path, family: Family, dtype: Any = None, arrange: Callable[[str, mx.array], Any] | None = None
) -> Flux3:
    """See `Architecture.load_transformer`. Raises ValueError if a weight is missing, unknown, damaged or of another shape."""
    config = transformer_config(path, family)
    unneeded = set(replace(config, references=True).shapes()) - set(config.shapes())
    arrays = weights.load_component(
        path,
        config.shapes(),
        convert=to_diffusers,
        ignore=lambda name: name in unneeded,
        dtype=dtype,
        arrange=arrange,
    )
    return Flux3(config, arrays)


def is_transformer(shapes: Mapping[str, tuple[int, ...]], family: Family) -> bool:
    if not (modulations := {name: shape for name, shape in shapes.items() if name.startswith(f"{MODULATIONS[0]}.")}):
        return False
    sizes = family.transformer
    streams = {name.split(".")[1] for name in modulations}  # other models of this architecture have more
    blocks = {name.split(".")[1] for name in shapes if name.startswith((f"{JOINT}.", f"{BLOCKS[JOINT]}."))}
    distilled = any(name.startswith(DISTILLED) for name in shapes)
    found = streams, modulations.popitem()[1][0], len(blocks), distilled
    hidden = sizes["num_attention_heads"] * sizes["attention_head_dim"]
    return found == (set(STREAMS.values()), 3 * hidden, sizes["num_single_layers"], sizes["flow_map"])
