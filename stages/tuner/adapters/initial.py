"""An adapter that starts as another one: the same change of the base, up to rounding, in the targets' own sizes.

A smaller rank is filled up with fresh directions that change nothing yet. A larger one is refused: cut by its singular
values it would be another adapter than the one that was named.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping

import mlx.core as mx

from stages.tuner.adapters import dora, lokr, lora
from stages.tuner.adapters.lora import Arrays, Target
from stages.tuner.blockwise import quantize

RANKED = {lora.A: 0, lora.B: 1, lokr.W2_A: 1, lokr.W2_B: 0}  # an array's axis of length R


def refuse(found: Mapping[str, mx.array], scales: Mapping[str, float], targets: Iterable[Target]) -> None:
    """ValueError, one line, for an adapter that does not fit these targets: known by itself, without a weight of the base.

    It does not fit if it is of a Linear that is no target, of another shape, of a larger rank, of another variant, or broken.
    """
    chosen = {target.name: target for target in targets}
    for name in scales:
        if name not in chosen:
            near = "".join(f"; near it: {close}" for close in difflib.get_close_matches(name, chosen, n=1))
            raise ValueError(f"the adapter adapts {name}, which is no target; widen the targets{near}")
        _compare(chosen[name], lora.of_linear(found, name))
    for name, value in found.items():
        if not mx.all(mx.isfinite(value)).item():
            raise ValueError(f"its {name} has values that are not finite; choose a checkpoint from before they were")


def initial(
    found: Mapping[str, mx.array],
    scales: Mapping[str, float],
    targets: Iterable[Target],
    fresh: Mapping[str, mx.array],
    bases: Mapping[str, quantize.Weight] | None = None,
) -> Arrays:
    """Arrays for all targets: from `found`, whose Linears are scaled by `scales`, and from `fresh` (see `lora.init`) elsewhere.

    A LoRA may begin a DoRA, if `bases` has the weights. ValueError for an adapter that `refuse` refuses.
    """
    chosen = list(targets)
    refuse(found, scales, chosen)
    made: Arrays = {}
    for target in chosen:
        name, own = target.name, lora.of_linear(fresh, target.name)
        if name in scales:
            own |= _fitted(target, lora.of_linear(found, name), scales[name], own)
            if target.variant == "dora" and name + dora.MAGNITUDE not in found:
                assert bases is not None, "the magnitudes of a LoRA are the lengths of the rows that it leads to"
                own[dora.MAGNITUDE] = dora.lengths(bases[name], own[lora.A], own[lora.B], target.scale)
                mx.eval(own[dora.MAGNITUDE])
        made |= {name + ending: value.astype(mx.float32) for ending, value in own.items()}
    return made


def _compare(target: Target, arrays: Arrays) -> None:
    """Refuse one Linear's arrays if the target's cannot be made of them."""
    given = {*arrays} if target.variant != "dora" else {*arrays, dora.MAGNITUDE}
    if given != {*target.shapes}:
        raise ValueError(f"its adapter of {target.name} is {_told(arrays)}; the target's is {_told(target.shapes)}")
    if lora.shape_of(arrays) != (target.outputs, target.inputs):
        raise ValueError(
            f"its adapter of {target.name} is of shape {lora.shape_of(arrays)}, "
            f"the Linear of {(target.outputs, target.inputs)}; is it an adapter of another model?"
        )
    for ending, value in arrays.items():
        wanted, axis = target.shapes[ending], RANKED.get(ending)
        if axis is not None and value.shape[axis] > wanted[axis]:
            raise ValueError(
                f"its adapter of {target.name} has rank {value.shape[axis]}, above the target's {wanted[axis]}; "
                f"raise the rank to {value.shape[axis]}"
            )
        if any(had != want for n, (had, want) in enumerate(zip(value.shape, wanted, strict=True)) if n != axis):
            raise ValueError(
                f"its adapter of {target.name} has {ending[1:]} of shape {value.shape}, the target {wanted}; "
                "choose the factor that it was trained with"
            )


def _fitted(target: Target, arrays: Arrays, scale: float, fresh: Arrays) -> Arrays:
    """One Linear's arrays, the file's scale exchanged for the target's, the rank filled up to the target's."""
    fitted = {}
    for ending, value in arrays.items():
        ratio = scale / target.scale if ending in lora.ZERO else 1.0
        fitted[ending] = _filled(ending, value.astype(mx.float32) * ratio, fresh[ending])
    return fitted


def _filled(ending: str, value: mx.array, fresh: mx.array) -> mx.array:
    """An array with the fresh array's last rows or columns (those of an array that starts at zero are zero) behind its own."""
    axis = RANKED.get(ending)
    if axis is None or value.shape[axis] == fresh.shape[axis]:
        return value
    return mx.concatenate([value, mx.split(fresh, [value.shape[axis]], axis=axis)[1]], axis=axis)


def _told(endings: Collection[str]) -> str:
    """The variant of one Linear's arrays, in words."""
    if lokr.W1 in endings:
        return "a LoKr with a whole w2" if lokr.W2 in endings else "a LoKr with a low-rank w2"
    return "a DoRA" if dora.MAGNITUDE in endings else "a LoRA"
