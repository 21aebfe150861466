"""The optimizer's part of a training step: gradient norm, clipping, update, moving average.

Arrays of one shape are stacked: a few large operations, not hundreds of small ones. Unless all is finite, nothing is updated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from stages.kernels import compiles, dispatch
from stages.tuner.adapters.lora import B
from stages.tuner.optimizers.optimizer import Flag, Optimizer, Params, mean_weights
from stages.tuner.weights import Arrays

Groups = dict[str, list[str]]  # name of a stack (its first array's name) -> names of all its arrays

LARGEST = 1 << 23  # values of a stack: 32 MiB in float32, which bounds the working memory of an optimizer step


@dataclass(frozen=True)
class Stacks:
    """Named arrays in stacks: N matrices of one shape become (N, rows, columns), even if N is 1; others are stored alone."""

    groups: Groups
    arrays: Arrays  # by the name of a stack

    @classmethod
    def of(cls, arrays: Mapping[str, mx.array], apart: str = "") -> Stacks:
        """`apart`: no stack has both arrays whose names end with this and others; "": any of one shape."""
        groups = group_by_shape(arrays, apart)
        return cls(groups, stack(arrays, groups))

    def unstack(self) -> Arrays:
        return unstack(self.arrays, self.groups)

    def cast(self, dtype: mx.Dtype) -> Stacks:
        # Vectors and scalars keep their dtype: only a stack of matrices has three axes.
        return replace(self, arrays={name: a.astype(dtype) if a.ndim == 3 else a for name, a in self.arrays.items()})

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.arrays.values())


def group_by_shape(arrays: Mapping[str, mx.array], apart: str = "") -> Groups:
    """Which arrays share a stack. Depends on names and shapes only."""
    groups: Groups = {}
    latest: dict[tuple[bool, tuple[int, ...]], str] = {}
    # An adapter has hundreds of arrays of a dozen shapes, and a GPU needs longer to launch a small operation than to compute
    # it.
    for name in sorted(arrays):
        shape = tuple(arrays[name].shape)
        kind = bool(apart) and name.endswith(apart), shape
        first = latest.get(kind)
        if len(shape) != 2 or first is None or (len(groups[first]) + 1) * math.prod(shape) > LARGEST:
            latest[kind] = first = name
            groups[first] = []
        groups[first].append(name)
    return groups


def stack(arrays: Mapping[str, mx.array], groups: Groups) -> Arrays:
    return {
        name: mx.stack([arrays[each] for each in names]) if arrays[name].ndim == 2 else arrays[name]
        for name, names in groups.items()
    }


def unstack(stacks: Mapping[str, mx.array], groups: Groups) -> Arrays:
    return {
        each: one.squeeze(0) if one.ndim == 3 else one
        for name, names in groups.items()
        for each, one in zip(names, mx.split(stacks[name], len(names)) if stacks[name].ndim == 3 else [stacks[name]], strict=True)
    }


# An exponential moving average of the trained arrays: smoother than the last step's arrays, and often the better adapter

EMA_PREFIX, EMA_COUNT = "ema.", "ema_updates"  # keys in the state: one array per trained array, and the number of updates


@dataclass(frozen=True)
class Averaged:
    """An optimizer whose state also holds a moving average of the arrays, so that a resumed run has the same bits.

    It helps if samples differ much between checkpoints (few images, batches of one) and costs the arrays' memory again.
    """

    method: Optimizer
    decay: float = 0.99  # for a thousand steps; 0.999 for ten thousand

    @property
    def coupled(self) -> bool:
        return self.method.coupled

    def init(self, params: Params) -> Arrays:
        average = {EMA_PREFIX + name: value for name, value in params.items()}
        return self.method.init(params) | {EMA_COUNT: mx.zeros((), mx.int32)} | average

    def update(
        self, params: Params, grads: Params, state: Arrays, lr: float | mx.array, apply: Flag = True
    ) -> tuple[Arrays, Arrays]:
        inner = {name: value for name, value in state.items() if name != EMA_COUNT and not name.startswith(EMA_PREFIX)}
        new_params, new_state = self.method.update(params, grads, inner, lr, apply)
        n = state[EMA_COUNT].astype(mx.float32)
        # The warm-up form of TensorFlow and diffusers, which forgets the start within some tens of steps.
        _, new = mean_weights(mx.minimum(self.decay, (1 + n) / (10 + n)), apply)
        new_state[EMA_COUNT] = state[EMA_COUNT] + apply
        for name, value in new_params.items():
            old = state[EMA_PREFIX + name]
            new_state[EMA_PREFIX + name] = old + new * (value - old)
        return new_params, new_state


def averages(state: Params) -> Arrays:
    return {name.removeprefix(EMA_PREFIX): value for name, value in state.items() if name.startswith(EMA_PREFIX)}


WORK = 6  # memory needed to update one stack, in sizes of the stack: its gradient, old and new values, intermediate arrays
WORK_COMPILED = 4  # memory needed if the update is compiled, in the same unit


class OptimizerStep:
    def __init__(self, method: Optimizer, max_norm: float, ratio: float = 1.0) -> None:
        """`max_norm`: of all gradients together; 0: no limit. `ratio`: rate of B relative to that of all other arrays (LoRA+,
        Hayou et al. 2024, arXiv 2402.12354); needs stacks `apart`, and a method that is not coupled.
        """
        assert ratio == 1 or not method.coupled
        self.method, self.max_norm, self.ratio = method, max_norm, ratio
        self.apart = B if ratio != 1 else ""
        self._update = mx.compile(self._clipped_update) if compiles() else self._clipped_update

    def __call__(
        self,
        params: Stacks,
        grads: Arrays,
        state: Arrays,
        lr: float,
        losses_finite: mx.array,
        reduce: Callable[[Arrays], Arrays] = lambda gradients: gradients,
    ) -> tuple[Stacks, Arrays, mx.array, mx.array]:
        """(new params, new state, norm before clipping, whether updated), lazy. Consumes `grads`."""
        groups = params.groups
        stacked = stack(grads, groups)
        grads.clear()
        # `reduce` gets stacks, and the norm is of its result: with several processes, that of the whole batch.
        gradients = reduce(stacked)
        norm = global_norm(gradients)
        updated = losses_finite & mx.isfinite(norm)
        factor = clip_factor(norm, self.max_norm)
        apply = updated.astype(mx.int32)  # a number: a GPU would compile a kernel of its own to add a boolean, for seconds
        dispatch(norm, apply, factor, gradients)
        new_params: Arrays = {}
        new_state: Arrays = {}
        # Keys in sorted order: a dict from a file has another order, which would compile to another graph with other last bits.
        owners = {key: _owner(key, groups) for key in sorted(state)}
        # One stack after another where possible, so that one's intermediate arrays are freed before the next one's exist.
        for names in [list(groups)] if self.method.coupled else [[name] for name in groups]:
            rate = lr * self.ratio if self.apart and names[0].endswith(self.apart) else lr
            own_params, own_state = self._update_stacks(names, params.arrays, gradients, state, owners, (rate, factor, apply))
            dispatch((own_params, own_state))
            new_params |= own_params
            new_state |= own_state
        return Stacks(groups, new_params), new_state, norm, updated

    def _update_stacks(
        self,
        names: list[str],
        params: Arrays,
        gradients: Arrays,
        state: Arrays,
        owners: Mapping[str, str | None],
        numbers: tuple[float, mx.array, mx.array],
    ) -> tuple[Arrays, Arrays]:
        """Updates some stacks. `owners`: key of the state -> its stack, or None if shared. `numbers`: lr, clip factor, apply."""
        lr, factor, apply = numbers
        own_state = {key: state[key] for key, owner in owners.items() if owner is None or owner in names}
        own_params = {name: params[name] for name in names}
        # Popped, so that no reference keeps them in memory.
        own_gradients = {name: gradients.pop(name) for name in names}
        updated: Any = self._update(own_params, own_gradients, own_state, mx.array(lr, mx.float32), factor, apply)
        return updated[0], updated[1]

    def working_bytes(self, params: Stacks) -> int:
        """Peak of a step for gradients, new params, new state and intermediate arrays, besides params and state."""
        largest = max(value.nbytes for value in params.arrays.values())
        state = sum(value.nbytes for value in self.method.init(params.arrays).values())
        # One stack's gradient is freed when its new params and state exist.
        return (
            params.nbytes + state + (WORK_COMPILED if compiles() else WORK) * (params.nbytes if self.method.coupled else largest)
        )

    def _clipped_update(
        self, params: Arrays, grads: Arrays, state: Arrays, lr: mx.array, factor: mx.array, apply: mx.array
    ) -> tuple[Arrays, Arrays]:
        # Zeros if the step is skipped: a value that is not finite would reach the result even with the weight 0.
        finite = {name: mx.where(apply, factor * grad.astype(mx.float32), 0.0) for name, grad in grads.items()}
        return self.method.update(params, finite, state, lr, apply)


def _owner(key: str, groups: Groups) -> str | None:
    """The stack of an entry: "<stack>" for "<stack>.m.scale", None for an entry that all stacks share, such as "step"."""
    name = key.removeprefix(EMA_PREFIX)
    while name and name not in groups:
        name = name.rpartition(".")[0]
    return name or None


def global_norm(arrays: Mapping[str, mx.array]) -> mx.array:
    # In the order of names: a dict from a file has another order, which would give other last bits.
    squares = [mx.sum(mx.square(arrays[name].astype(mx.float32))) for name in sorted(arrays)]
    return mx.sqrt(mx.sum(mx.stack(squares)))


def clip_factor(norm: mx.array, max_norm: float) -> mx.array:
    return mx.minimum(1.0, max_norm / (norm + 1e-6)) if max_norm else mx.ones(())


def is_finite(params: Mapping[str, mx.array], state: Mapping[str, mx.array]) -> mx.array:
    """Whether the norm of `params` and all scalars of `state` are finite. Lazy."""
    # An update can overflow although its gradient is finite: the learning rate, or Prodigy's estimate of it, may be too
    # large.
    numbers = [state[name].astype(mx.float32) for name in sorted(state) if not state[name].ndim]
    return mx.all(mx.isfinite(mx.stack([global_norm(params), *numbers])))
