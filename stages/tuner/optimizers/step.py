"""Optimizers as functions over flat dicts of float32 arrays; the state is explicit, flat and of arrays only.

An optimizer has `init(params) -> state` and `update(params, grads, state, lr, go) -> (params, state)`, both lazy, without
a look at any value. Each has a file of its own, which says when to use it; `make` finds it by name, and a `OptimizerStep` makes
the whole of a step from it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Protocol

import mlx.core as mx

from stages.tuner.adapters import stacks
from stages.tuner.adapters.stacks import Stacks
from stages.tuner.blockwise.backprop import compiles, dispatch
from stages.tuner.optimizers import ema
from stages.tuner.optimizers.adafactor import Adafactor
from stages.tuner.optimizers.adamw import AdamW
from stages.tuner.optimizers.adamw8bit import AdamW8bit
from stages.tuner.optimizers.lion import Lion
from stages.tuner.optimizers.moments import Go
from stages.tuner.optimizers.prodigy import Prodigy

__all__ = ["METHODS", "AdamW", "Optimizer", "OptimizerStep", "clipping", "global_norm", "make"]

Arrays = dict[str, mx.array]

WORK = 6  # stacks' worth of arrays while one is updated: its gradient, old and new, intermediate ones
WORK_COMPILED = 4  # the same where the update is compiled


class Optimizer(Protocol):
    """What every optimizer is."""

    def init(self, params: Mapping[str, mx.array]) -> Arrays:
        """The state before the first step."""

    def update(
        self, params: Mapping[str, mx.array], grads: Mapping[str, mx.array], state: Arrays, lr: float | mx.array, go: Go = True
    ) -> tuple[Arrays, Arrays]:
        """One step down the gradient: the new arrays and the new state, of the same names, shapes and dtypes.

        Where `go` is false, both as they were; the gradients must be finite even then.
        """


class Method(Optimizer, Protocol):
    """An optimizer that has a name, and a learning rate to begin with."""

    usual_lr: ClassVar[float]


METHODS: dict[str, Callable[..., Method]] = {
    "adamw": AdamW,
    "adamw8bit": AdamW8bit,
    "adafactor": Adafactor,
    "lion": Lion,
    "prodigy": Prodigy,
}
LIMITS = {  # of their numbers: least, and what they must stay below
    **dict.fromkeys(("beta1", "beta2", "beta3"), (0.0, 1.0)),
    **dict.fromkeys(("d0", "d_coef", "clip_threshold", "decay_rate"), (1e-30, math.inf)),
    "eps": (1e-30, math.inf),  # or an array without a gradient, as A is in the first step, would be 0 / 0
    **dict.fromkeys(("floor", "weight_decay"), (0.0, math.inf)),
}


def make(name: str, **numbers: Any) -> Method:
    """The optimizer of that name with these numbers, each its field's default where it is not given.

    ValueError for a name that there is not, a number that this optimizer does not have, or one out of range.
    """
    if name not in METHODS:
        raise ValueError(f"optimizer: {name!r} is not known; {_choice(name, METHODS)}")
    fields = [field.name for field in dataclasses.fields(METHODS[name])]  # type: ignore[arg-type]
    for number, value in numbers.items():
        if number not in fields:
            raise ValueError(f"optimizer: {name} has no {number!r}; {_choice(number, fields)}")
        low, high = LIMITS.get(number, (None, None))
        if low is not None and value is not None and not low <= value < high:
            below = "" if high == math.inf else f" and below {high:g}"
            raise ValueError(f"optimizer: {number} = {value} is wrong; {low:g} or more{below} is wanted")
    return METHODS[name](**numbers)


def _choice(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, words, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(words)}"


class OptimizerStep:
    """A step as one function of arrays: norm, clip, the optimizer's update, and nothing where something is not finite.

    Arrays of one shape are one (see `stacks`), and the state is that of the stacks: their names are those of their first
    arrays. On a GPU the update is compiled, AdamW's to one pass over the memory of each stack.

    Stacks are handed over one after another, where they need nothing of each other, so that one's intermediate arrays
    are let go before the next one's are made.
    """

    def __init__(self, method: Optimizer, limit: float) -> None:
        self.method, self.limit = method, limit
        self._update = mx.compile(self._clipped) if compiles() else self._clipped

    def init(self, params: Stacks) -> Arrays:
        """The state before the first step."""
        return self.method.init(params.arrays)

    def __call__(
        self, params: Stacks, grads: Arrays, state: Arrays, lr: float, sound: mx.array
    ) -> tuple[Stacks, Arrays, mx.array, mx.array]:
        """(params, state, norm, done), not awaited. `grads` are by the arrays' own names, in float32 or what was computed in.

        `norm` is the gradients' before they are clipped to `limit`. Where `sound`, a boolean array of one value, is false
        or the norm is not finite, `done` is false, and params and state are what they were. All three are emptied as
        their arrays are used up: there is no second copy of any.
        """
        plan = params.plan
        slope = stacks.stack(grads, plan)
        grads.clear()
        norm = global_norm(slope)
        done, shrink = sound & mx.isfinite(norm), clipping(norm, self.limit)
        go = done.astype(mx.int32)  # a number already: to add a boolean, a GPU would compile a kernel of its own, for seconds
        dispatch(norm, go, shrink, slope)
        after: Arrays = {}
        fresh: Arrays = {}
        # Names in order: that of a dict from a file is another, and would make another compiled graph, of other last bits.
        owners = {key: _owner(key, plan) for key in sorted(state)}
        for part in [list(plan)] if self._together else [[name] for name in plan]:
            held = {key: state.pop(key) if owner else state[key] for key, owner in owners.items() if owner in (None, *part)}
            old, own_slope = ({name: source.pop(name) for name in part} for source in (params.arrays, slope))
            own: Any = self._update(old, own_slope, held, mx.array(lr, mx.float32), shrink, go)
            del old, own_slope, held
            dispatch(own)
            fresh |= own[0]
            after |= own[1]
        return Stacks(plan, fresh), after, norm, done

    def working(self, params: Stacks) -> int:
        """Bytes that a step takes at its most beside arrays and state: gradients, and what is computed of one stack."""
        largest = max(value.nbytes for value in params.arrays.values())
        return params.nbytes + (WORK_COMPILED if compiles() else WORK) * (params.nbytes if self._together else largest)

    @property
    def _together(self) -> bool:
        """Whether the step of one array depends on the others."""
        return isinstance(getattr(self.method, "method", self.method), Prodigy)

    def average(self, params: Stacks, state: Arrays) -> Arrays:
        """The adapter of averages that a state holds, where the optimizer is `ema.Averaged`; empty where it is not."""
        found = ema.arrays(state)
        return stacks.unstack(found, params.plan) if found else {}

    def _clipped(self, params: Arrays, grads: Arrays, state: Arrays, lr: mx.array, shrink: mx.array, go: mx.array) -> Any:
        finite = {name: mx.where(go, shrink * grad.astype(mx.float32), 0.0) for name, grad in grads.items()}
        return self.method.update(params, finite, state, lr, go)


def _owner(key: str, plan: stacks.Plan) -> str | None:
    """The stack that an entry of a state belongs to; None where it belongs to all."""
    name = key.removeprefix(ema.PREFIX)
    while name and name not in plan:
        name = name.rpartition(".")[0]  # "<stack>.m", "<stack>.m.scale"
    return name or None


def global_norm(grads: Mapping[str, mx.array]) -> mx.array:
    """The Euclidean norm of all arrays together, a float32 scalar; lazy, one reduction for all.

    Summed in the order of names: a dict that was read from a file has another order, and a sum other last bits.
    """
    squares = [mx.sum(mx.square(grads[name].astype(mx.float32))) for name in sorted(grads)]
    return mx.sqrt(mx.sum(mx.stack(squares)))


def bounded(params: Mapping[str, mx.array], state: Mapping[str, mx.array]) -> mx.array:
    """Whether the arrays' length is finite, and so what a state holds of all of them together: one boolean, lazy.

    An update may turn infinite though its gradient is not: a rate too large, or an estimate of it (Prodigy's).
    """
    numbers = [state[name].astype(mx.float32) for name in sorted(state) if not state[name].ndim]
    return mx.all(mx.isfinite(mx.stack([global_norm(params), *numbers])))


def clipping(norm: mx.array, limit: float) -> mx.array:
    """What gradients are multiplied by so that their norm is at most `limit`, a scalar; 1 where the limit is 0."""
    return mx.minimum(1.0, limit / (norm + 1e-6)) if limit else mx.ones(())
