"""Adapters in the layouts of this program and diffusers, ComfyUI, kohya and LyCORIS. R rank, I inputs, O outputs."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from stages.kernels import Arrays
from stages.models import adapters, weights
from stages.models.adapters import ALPHA, DORA_SCALE, MAGNITUDE, W1, W1_A, W1_B, W2, W2_A, W2_B, A, B, Scales
from stages.models.names import Reference, parts, split_number
from stages.untrusted import parse_json

PREFIXES = ("base_model.model.", "diffusion_model.", "transformer.")
UNDERSCORED = ("lora_unet_", "lycoris_")  # before names with underscores for dots
_READ = {A: A, B: B, ".lora_A.default.weight": A, ".lora_B.default.weight": B}
_READ |= {".lora_down.weight": A, ".lora_up.weight": B, MAGNITUDE: MAGNITUDE, MAGNITUDE + ".weight": MAGNITUDE}
_READ |= {DORA_SCALE: MAGNITUDE, ALPHA: ALPHA} | {ending: ending for ending in (W1, W1_A, W1_B, W2, W2_A, W2_B)}
_SPLIT = re.compile("(.+?)(" + "|".join(re.escape(e) for e in sorted(_READ, key=len, reverse=True)) + ")")


@dataclass(frozen=True)
class Names:
    """What an architecture's Linears are called in adapter files. {} in a name is the block's number."""

    model: str  # in messages
    reference: Reference  # all spellings that are not diffusers'
    swapped: str = ""  # the makers' Linear whose rows are in two halves, in the other order than diffusers'
    others: tuple[str, ...] = ()  # Linears that have one name everywhere

    @functools.cached_property
    def underscored(self) -> dict[str, str]:
        """diffusers' and the makers' names by what kohya and LyCORIS make of them: underscores for dots."""
        every = itertools.chain(self.reference, *self.reference.values(), self.others)
        return {name.replace(".", "_"): name for name in every}


def parse_key(key: str, names: Names) -> tuple[str, str]:
    """(Linear, ending): transformer.proj_out.lora_down.weight -> (proj_out, .lora_A.weight). Names may be the makers'."""
    match = _SPLIT.fullmatch(key)
    if not match and key.endswith((".diff", ".diff_b")):
        raise ValueError(f"{key} adds to a whole weight or bias of {names.model}, as no LoRA, DoRA or LoKr does: it is not read")
    if not match:
        raise ValueError(f"{key} is no part of a LoRA, DoRA or LoKr that can be read")
    name, ending = match[1], _READ[match[2]]
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    for prefix in UNDERSCORED:
        if name.startswith(prefix):
            # transformer_blocks_3_attn_to_q -> transformer_blocks.3.attn.to_q
            pattern, block = split_number(name.removeprefix(prefix))
            if pattern not in names.underscored:
                raise ValueError(f"{key} names no linear of {names.model}; is the adapter one of another model?")
            name = names.underscored[pattern].replace("{}", block)
    return name, ending


def read(path: Path, names: Names) -> tuple[Arrays, Scales]:
    """(float32 arrays by diffusers' Linear and ending, scale by Linear). Fused q, k, v are split, or ValueError for some LoKr."""
    if not path.is_file():
        raise ValueError(f"no adapter at {path}")
    arrays, header = weights.read_file(path)
    found: Arrays = {}
    alphas: Scales = {}
    for key in sorted(arrays):
        name, ending = parse_key(key, names)
        wide = arrays[key].astype(mx.float32)
        if ending == ALPHA:
            alphas[name] = float(np.array(wide).item())
        elif ending == MAGNITUDE:
            if wide.ndim > 2 or (wide.ndim == 2 and wide.shape[1] != 1):
                raise ValueError(f"{key} of shape {wide.shape} sets the lengths of columns; only a DoRA of rows is read")
            found[name + ending] = wide.flatten()
        elif wide.ndim != 2:
            raise ValueError(f"{key} must be a matrix, got the shape {wide.shape}")
        else:
            found[name + ending] = wide
    if not found:
        raise ValueError(f"{path} holds no LoRA, DoRA or LoKr")
    ranks: dict[str, int | None] = {adapters.linear_name(key): None for key in found}
    ranks |= {key.removesuffix(W1_B): value.shape[0] for key, value in found.items() if key.endswith(W1_B)}
    ranks |= adapters.ranks(found)  # a second factor of low rank goes before a first one
    # Alphas as arrays (kohya, LyCORIS); else PEFT's config, if the keys have a prefix; else this program's header.
    if alphas:
        scales = {name: alphas.get(name, rank) / rank if rank else 1.0 for name, rank in ranks.items()}
    elif any(key.startswith((*PREFIXES, *UNDERSCORED)) for key in arrays):
        scales = _scales_of_peft(_entries(header, "lora_adapter_metadata", path), ranks, adapters.variant(found), path)
    else:
        listed, alpha = _entries(header, "scales", path), parse_json(header.get("alpha", "null"), f"{path}: alpha")
        by_rank = {name: _number(alpha, path) / rank if rank and alpha is not None else 1.0 for name, rank in ranks.items()}
        scales = {name: _number(listed.get(name, scale), path) for name, scale in by_rank.items()}
    return _unfuse(_multiply_w1(found), scales, names)


def _entries(header: dict[str, str], key: str, path: Path) -> dict[str, Any]:
    found = parse_json(header.get(key) or "{}", f"{path}: {key}")
    if not isinstance(found, dict):
        raise ValueError(f"{path}: {key} in the header must be a JSON object, got {type(found).__name__}")
    return found


def _number(value: Any, path: Path) -> float:
    if type(value) not in (int, float) or not abs(value) < 1e30:
        raise ValueError(f"{path}: scales, alphas and ranks in the header must be numbers, got {value!r:.80}")
    return float(value)


def _scales_of_peft(stored: dict[str, Any], ranks: dict[str, int | None], variant: str, path: Path) -> Scales:
    config = {key.removeprefix("transformer."): value for key, value in stored.items()}
    if config.get("use_dora") and variant != "dora":
        raise ValueError("the adapter says that it is a DoRA, but its file lacks the magnitudes")
    rank_of, alpha_of = (_patterns(config.get(f"{kind}_pattern"), path) for kind in ("rank", "alpha"))

    def setting(patterns: list[tuple[re.Pattern[str], Any]], name: str, otherwise: Any) -> float:
        return _number(next((value for pattern, value in patterns if pattern.match(name)), otherwise), path)

    scales = {}
    for name, own_rank in ranks.items():
        rank = own_rank or setting(rank_of, name, config.get("r", 0))
        alpha = setting(alpha_of, name, config.get("lora_alpha", config.get("alpha", rank)))
        scales[name] = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank) if rank > 0 else 1.0
    return scales


def _patterns(given: Any, path: Path) -> list[tuple[re.Pattern[str], Any]]:
    """PEFT's rule: the first pattern that matches the end of the name counts."""
    if not isinstance(given or {}, dict):
        raise ValueError(f"{path}: patterns of ranks and alphas must be a JSON object, got {type(given).__name__}")
    found = []
    for pattern, value in (given or {}).items():
        # With more repetitions, or repeated groups, a pattern could take hours.
        bounded = len(pattern) <= 200 and len(re.findall(r"[*+?{]", pattern)) <= 3 and not re.search(r"\)[*+?{]", pattern)
        try:
            found.append((re.compile(rf"(.*\.)?({pattern if bounded else '('})$"), value))
        except (re.error, OverflowError):
            raise ValueError(f"{path}: the pattern {pattern!r:.80} of a rank or an alpha cannot be read") from None
    return found


def _multiply_w1(arrays: Arrays) -> Arrays:
    names = dict.fromkeys(key.removesuffix(W1_A).removesuffix(W1_B) for key in arrays if key.endswith((W1_A, W1_B)))
    for name in names:
        if lone := next((end for end in (W1_A, W1_B) if name + end not in arrays), ""):
            raise ValueError(f"the adapter lacks {name}{lone}, though it has other arrays of {name}")
    products = {name + W1: arrays[name + W1_A] @ arrays[name + W1_B] for name in names}
    return {key: value for key, value in arrays.items() if not key.endswith((W1_A, W1_B))} | products


def _unfuse(arrays: Arrays, scales: Scales, names: Names) -> tuple[Arrays, Scales]:
    split: Arrays = {}
    own_scales: Scales = {}
    for name in adapters.linears(arrays):
        ours, own = parts(name, names.reference), adapters.of_linear(arrays, name)
        if name == names.swapped:
            # Rows of a Kronecker product follow its first factor, so that exchanging the halves of w1 is exact.
            own = {ending: weights.swap_halves(value) if ending in (B, MAGNITUDE, W1) else value for ending, value in own.items()}
        for part, part_arrays in zip(ours, _split_linear(name, own, len(ours)), strict=True):
            split |= {part + ending: value for ending, value in part_arrays.items()}
            own_scales[part] = scales[name]
    return split, own_scales


def _split_linear(name: str, own: Arrays, count: int) -> list[Arrays]:
    """Adapters of `count` equal parts of a Linear's outputs. Raises ValueError for a LoKr that cannot be split exactly."""
    if count == 1:
        return [own]
    if W1 in own:
        if own[W1].shape[0] % count:
            raise ValueError(f"{name}: a LoKr of q, k and v in one, w1 of {own[W1].shape[0]} rows, cannot be taken apart exactly")
        return [{**own, W1: w1} for w1 in mx.split(own[W1], count)]
    rows = {ending: mx.split(own[ending], count) for ending in (B, MAGNITUDE) if ending in own}
    parts = [{A: own[A], **{ending: split[i] for ending, split in rows.items()}} for i in range(count)]
    if own[A].shape[0] % count == 0:
        blocks = [mx.split(part[B], count, axis=1)[i] for i, part in enumerate(parts)]
        # A block-diagonal B, as `to_comfyui` makes it, uses only its own rows of A in each part.
        if mx.array_equal(own[B], block_diagonal(list(blocks))).item():
            return [{**part, A: a, B: b} for part, a, b in zip(parts, mx.split(own[A], count), blocks, strict=True)]
    return parts


def to_diffusers(arrays: Arrays, scales: Scales) -> Arrays:
    """Keys such as "transformer.proj_out.lora_A.weight", scales multiplied in. Raises ValueError for an incomplete Linear."""
    # Linears have diffusers' names from `Transformer.linears` on: a trained adapter only gets the prefix.
    out: Arrays = {}
    for name in adapters.linears(arrays):
        out |= {f"transformer.{name}{ending}": value for ending, value in scaled(arrays, scales, name).items()}
    return out


def to_comfyui(arrays: Arrays, scales: Scales, theirs: Mapping[str, str]) -> Arrays:
    """ComfyUI's prefix, then the name that `theirs` has for diffusers', {} being the block's number, or diffusers' own; scales
    multiplied in.
    """
    out: Arrays = {}
    for name in adapters.linears(arrays):
        own = scaled(arrays, scales, name)
        if MAGNITUDE in own:
            own[DORA_SCALE] = own.pop(MAGNITUDE)[:, None]  # ComfyUI would lay a plain vector along the inputs
        pattern, block = split_number(name)
        named = theirs.get(pattern, pattern).replace("{}", block)
        out |= {f"diffusion_model.{named}{ending}": value for ending, value in own.items()}
    return out


def scaled(arrays: Arrays, scales: Scales, name: str) -> Arrays:
    own = adapters.of_linear(arrays, name)
    target = W1 if W1 in own else B
    return {**own, target: own[target].astype(mx.float32) * scales[name]}


def block_diagonal(blocks: list[mx.array | None]) -> mx.array:
    """`blocks` (outputs, rank) on a diagonal, zeros elsewhere; None adds rows of zeros. Raises ValueError if outputs differ."""
    present = [b for b in blocks if b is not None]
    ranks, outputs = [b.shape[1] for b in present], {b.shape[0] for b in present}
    if len(blocks) > 1 and len(outputs) != 1:
        raise ValueError(f"q, k and v of one attention have different sizes: {sorted(outputs)}")
    rows, before = [], 0
    for b in blocks:
        if b is None:
            rows.append(mx.zeros((present[0].shape[0], sum(ranks)), present[0].dtype))
            continue
        after = sum(ranks) - before - b.shape[1]
        rows.append(mx.pad(b, [(0, 0), (before, after)]))
        before += b.shape[1]
    return mx.concatenate(rows)
