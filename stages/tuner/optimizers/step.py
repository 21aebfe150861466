"""The optimizer's part of a training step: gradient norm, clipping, update. If a value is not finite, nothing is updated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from stages.tuner.adapters import stacks
from stages.tuner.adapters.stacks import Stacks
from stages.tuner.blockwise.device import compiles, dispatch
from stages.tuner.optimizers import ema
from stages.tuner.optimizers.protocol import Arrays, Optimizer

WORK = 6  # memory needed to update one stack, in sizes of the stack: its gradient, old and new values, intermediate arrays
WORK_COMPILED = 4  # memory needed if the update is compiled, in the same unit


class OptimizerStep:
    def __init__(self, method: Optimizer, max_norm: float) -> None:
        self.method, self.max_norm = method, max_norm  # norm of all gradients together; 0: no limit
        self._update = mx.compile(self._clipped_update) if compiles() else self._clipped_update

    def init(self, params: Stacks) -> Arrays:
        return self.method.init(params.arrays)

    def __call__(
        self,
        params: Stacks,
        grads: Arrays,
        state: Arrays,
        lr: float,
        losses_finite: mx.array,
        reduce: Callable[[Arrays], Arrays] = lambda gradients: gradients,
    ) -> tuple[Stacks, Arrays, mx.array, mx.array]:
        """(new params, new state, norm before clipping, whether updated), all lazy. Consumes `params.arrays`, `grads`,
        `state`.
        """
        groups = params.groups
        stacked = stacks.stack(grads, groups)
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
            own_params, own_state = self._update_stacks(names, params.arrays, gradients, state, owners, (lr, factor, apply))
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
        # Popped, so that no reference keeps the old arrays in memory.
        own_state = {
            key: state.pop(key) if owner else state[key] for key, owner in owners.items() if owner is None or owner in names
        }
        own_params = {name: params.pop(name) for name in names}
        own_gradients = {name: gradients.pop(name) for name in names}
        result: Any = self._update(own_params, own_gradients, own_state, mx.array(lr, mx.float32), factor, apply)
        updated: tuple[Arrays, Arrays] = result
        return updated

    def working_bytes(self, params: Stacks) -> int:
        """Peak of a step for gradients and intermediate arrays, besides params and state."""
        largest = max(value.nbytes for value in params.arrays.values())
        return params.nbytes + (WORK_COMPILED if compiles() else WORK) * (params.nbytes if self.method.coupled else largest)

    def average(self, params: Stacks, state: Arrays) -> Arrays:
        averages = ema.averages(state)
        return stacks.unstack(averages, params.groups) if averages else {}

    def _clipped_update(
        self, params: Arrays, grads: Arrays, state: Arrays, lr: mx.array, factor: mx.array, apply: mx.array
    ) -> tuple[Arrays, Arrays]:
        # Zeros if the step is skipped: a value that is not finite would reach the result even with the weight 0.
        finite = {name: mx.where(apply, factor * grad.astype(mx.float32), 0.0) for name, grad in grads.items()}
        return self.method.update(params, finite, state, lr, apply)


def _owner(key: str, groups: stacks.Groups) -> str | None:
    """The stack of an entry: "<stack>" for "<stack>.m.scale", None for an entry that all stacks share, such as "step"."""
    name = key.removeprefix(ema.PREFIX)
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
