"""Which Linears get an adapter: patterns of names, and the rank, alpha and variant of each."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from stages.tuner.adapters import dora, full, lokr
from stages.tuner.adapters.lora import A, B

Variant = Literal["lora", "dora", "lokr"]
Shapes = Mapping[str, tuple[int, int]]  # name of a Linear -> (outputs, inputs)


@dataclass(frozen=True)
class Target:
    """A Linear that gets an adapter, with the settings of this adapter. `name` is the name of the Linear. Its weight
    has the shape `(outputs, inputs)`. `variant` is "lora", "dora", "lokr" or "full". The variant "full" trains the
    whole weight and ignores `rank` and `alpha`. The property `scale` is the factor of the weight's change; it depends
    on `rank`, `alpha` and `rslora`. `factor` limits a LoKr's first matrix `w1` to `factor` rows and `factor` columns;
    None means no such limit.

    rsLoRA: Kalajdzievski 2023, arXiv 2312.03732. `lokr.factorize` applies `factor`.
    """

    name: str
    outputs: int
    inputs: int
    rank: int
    alpha: float
    variant: Variant | Literal["full"] = "lora"
    rslora: bool = False
    factor: int | None = None

    @property
    def scale(self) -> float:
        """The factor that multiplies the adapter's change of the weight. It is `alpha / rank`, or `alpha / sqrt(rank)`
        if `rslora` is true. For a LoKr with a whole (not low-rank) second matrix `w2`, the factor is 1. It is also 1 for
        the variant "full".
        """
        if lokr.W2 in self.shapes or self.variant == "full":
            return 1.0
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the adapter's arrays, as a dict from key ending to shape. LoRA has ".lora_A.weight", `(rank,
        inputs)`, and ".lora_B.weight", `(outputs, rank)`. DoRA also has a magnitude, `(outputs,)`. LoKr has ".lokr_w1",
        `(a, b)`, and ".lokr_w2", `(c, d)`, with `a * c = outputs` and `b * d = inputs`. The variant "full" has one
        array, `(outputs, inputs)`.

        If the rank of a LoKr is below `max(c, d) / 2`, two low-rank arrays replace ".lokr_w2". These are ".lokr_w2_a",
        `(c, rank)`, and ".lokr_w2_b", `(rank, d)`.
        """
        if self.variant == "full":
            return {full.DIFF: (self.outputs, self.inputs)}
        if self.variant == "lokr":
            return dict(lokr.array_shapes(self.outputs, self.inputs, self.rank, self.factor))
        pair: dict[str, tuple[int, ...]] = {A: (self.rank, self.inputs), B: (self.outputs, self.rank)}
        return pair | {dora.MAGNITUDE: (self.outputs,)} if self.variant == "dora" else pair


def select_targets(
    linears: Shapes,
    patterns: Iterable[str],
    rank: int,
    alpha: float | None = None,
    *,
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float] | None = None,
    variant: Variant = "lora",
    rslora: bool = False,
    factor: int | None = None,
    whole: Sequence[str] = (),
) -> list[Target]:
    """Return one `Target` for each Linear (linear layer) to train. `linears` maps names of Linears to (outputs,
    inputs). Linears that match `patterns`, such as "attn.to_q" or "*", get an adapter. `variant` is the adapter's kind:
    "lora", "dora" or "lokr". The adapter has the rank `rank` and the scale `alpha` / `rank`, or `alpha` / sqrt(`rank`)
    if `rslora` is True. If `alpha` is None, the rank is used as alpha. `ranks` and `alphas` map a pattern to another
    rank or alpha for matching Linears. `factor` is the largest number of rows, and of columns, of a LoKr's first
    matrix. Linears that match `whole` get no adapter: their whole weight is trained.

    The scale multiplies the adapter's change of the weight. `alpha` None is an error if `rslora` is True. `factor` None
    means no limit. In `ranks` and `alphas`, the first matching pattern counts. Rank 0 leaves a Linear out. A LoKr with
    a whole (not low-rank) second matrix is not scaled. The result has the order of `linears`; the targets of `whole`
    come last. Raises ValueError if a pattern matches nothing, if a value is out of range, or if no Linear gets an
    adapter.
    """
    trained_whole = _matching_linears(linears, whole, "full") if whole else {}
    rest = {name: shape for name, shape in linears.items() if name not in trained_whole}
    chosen = _matching_linears(rest, list(patterns))
    _check_overrides("rank_for", ranks or {}, chosen, zero_allowed=True)
    _check_overrides("alpha_for", alphas or {}, chosen, zero_allowed=False)
    if rslora and alpha is None:
        neutral = f"{math.sqrt(rank):.3g}"
        raise ValueError(f"rslora needs an alpha, which it divides by sqrt(rank); alpha = {neutral} gives a scale of 1")
    targets = []
    for name, (outputs, inputs) in chosen.items():
        if own_rank := _first_match(name, ranks, rank):
            if own_rank > min(outputs, inputs) and variant != "lokr":
                narrow = f"{min(outputs, inputs)} for {name} ({outputs} x {inputs})"
                raise ValueError(f"rank must be <= {narrow}, got {own_rank:g}: a larger one adds nothing; see rank_for")
            own_alpha = _first_match(name, alphas, own_rank if alpha is None else alpha)
            targets.append(Target(name, outputs, inputs, int(own_rank), float(own_alpha), variant, rslora, factor))
    if not targets:
        raise ValueError("rank_for must leave at least one target a rank above 0, got rank 0 for all of them")
    return targets + [Target(name, *shape, 1, 1.0, "full") for name, shape in trained_whole.items()]


def _matching_linears(linears: Shapes, patterns: Sequence[str], setting: str = "targets") -> dict[str, tuple[int, int]]:
    if not patterns:
        raise ValueError('targets must have at least one pattern, got none; ["*"] is every Linear of the blocks')
    for pattern in patterns:
        if not any(matches_pattern(name, pattern) for name in linears):
            raise ValueError(f"{setting}: {pattern!r} matches no Linear of the blocks{similar_names(pattern, linears)}")
    return {name: shape for name, shape in linears.items() if any(matches_pattern(name, pattern) for pattern in patterns)}


def _check_overrides(setting: str, values: Mapping[str, float], targets: Iterable[str], zero_allowed: bool) -> None:
    names = list(targets)
    for pattern, value in values.items():
        if not any(matches_pattern(name, pattern) for name in names):
            raise ValueError(f"{setting}: {pattern!r} matches no target{similar_names(pattern, names)}")
        if value < 0 or (value == 0 and not zero_allowed):
            bound = ">= 0 (0 leaves the Linears out)" if zero_allowed else "> 0"
            raise ValueError(f"{setting}: the value of {pattern!r} must be {bound}, got {value}")


def _first_match(name: str, values: Mapping[str, float] | None, default: float) -> float:
    return next((value for pattern, value in (values or {}).items() if matches_pattern(name, pattern)), default)


def matches_pattern(name: str, pattern: str) -> bool:
    """Return True if `pattern` matches the name of a Linear. `pattern` may have shell wildcards. It must match the whole
    name, or the end of the name after any dot. "*" matches every name. "attn.to_q" matches this Linear in every block.
    "single_transformer_blocks.*" matches every Linear of these blocks.
    """
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def similar_names(pattern: str, names: Iterable[str]) -> str:
    """Return a hint for an error message, such as "; nearest: a, b". It lists up to three names that are similar to
    `pattern`. `names` are the names of all Linears. The part of a name after any dot is compared too, such as "to_q"
    for "blocks.0.to_q". The hint shows "*" in place of a block number. Return "" if no name is similar.
    """
    endings: dict[str, None] = {}
    for name in names:
        parts = ["*" if part.isdigit() and at == 1 else part for at, part in enumerate(name.split("."))]
        endings |= {".".join(parts[start:]): None for start in range(len(parts)) if parts[start] != "*"}
    close = difflib.get_close_matches(pattern, endings, n=3, cutoff=0.5)
    return f"; nearest: {', '.join(close)}" if close else ""


def target_scales(targets: Iterable[Target]) -> dict[str, float]:
    """Return the scale of each target's adapter, as name of the Linear -> scale. The adapter's change of the weight is
    multiplied by the scale.
    """
    return {target.name: target.scale for target in targets}


def adapter_metadata(targets: Iterable[Target]) -> dict[str, str]:
    """Return the metadata for the header of an adapter file, as a dict of strings. `targets` are the Linears (linear
    layers) in the file. The keys "variant", "rank" and "alpha" hold the values of the first target. The key "scales" is
    added if the scale of any target differs from "alpha" divided by the rank of this target. "scales" is a JSON object
    from the name of each Linear to its scale.

    For example, the first target has rank 8 and alpha 8. The second has rank 16 and alpha 16, so its scale is 1. But
    `8 / 16` is 0.5, so "scales" is added. Without "scales", a program that reads the file divides "alpha" by the rank
    of each Linear's own arrays.

    A LoKr with a whole (not low-rank) matrix `w2` and a Linear that is trained in full always have scale 1. Their
    scales are not compared.
    """
    chosen = list(targets)
    first = chosen[0]
    metadata = {"variant": first.variant, "rank": str(first.rank), "alpha": f"{first.alpha:g}"}
    unscaled = (lokr.W2, full.DIFF)
    if any(t.scale != float(metadata["alpha"]) / t.rank and not any(suffix in t.shapes for suffix in unscaled) for t in chosen):
        metadata["scales"] = json.dumps(target_scales(chosen))
    return metadata
