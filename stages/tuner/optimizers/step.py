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
    """The training step of an adapter: it clips the gradients and updates the arrays. Call the object to take one step.
    `method` is the optimizer. `max_norm` is the largest global norm of the gradients; larger gradients are scaled down.
    If `max_norm` is 0, there is no limit. If a loss or a gradient is not finite, nothing is updated.

    On a GPU the update is compiled.
    """

    def __init__(self, method: Optimizer, max_norm: float) -> None:
        self.method, self.max_norm = method, max_norm
        self._update = mx.compile(self._clipped_update) if compiles() else self._clipped_update

    def init(self, params: Stacks) -> Arrays:
        """Return the optimizer's state before the first step, as a dict from name to array. `params` holds the
        adapter's arrays as stacks. A stack joins arrays of equal shape along a new first axis.
        """
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
        """Take one training step and return `(new params, new state, norm, updated)`. `params` holds the adapter's
        arrays as stacks: arrays of equal shape joined into one. `grads` maps the name of each single array to its
        gradient. `state` is the optimizer's state. `lr` is the learning rate. `losses_finite` is a boolean scalar
        array: true if all losses are finite. The function `reduce` may change the gradients, for example combine them
        with those of other processes. `norm` is the global norm of the gradients before clipping. `updated` says
        whether the update was made.

        `norm` is a scalar array, and `updated` is a boolean scalar array. `updated` is true if the losses and `norm`
        are finite. If it is false, no value was changed. `grads` is joined into stacks before `reduce` is called.
        `reduce` gets a dict from the name of each stack to its gradient, and returns such a dict. By default, it
        returns the gradients unchanged. `norm` is computed after `reduce`.

        The dicts `params.arrays`, `grads` and `state` must not be used after the call. Most of their entries are
        removed to save memory.

        The results are scheduled on the device but may not be computed yet.
        """
        groups = params.groups
        stacked = stacks.stack(grads, groups)
        grads.clear()
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
        """Update some stacks of an adapter by one step and return `(new arrays, new state)`. A stack joins arrays of
        equal shape into one array. `names` are the stacks to update. `params` maps the name of each stack to its array,
        and `gradients` maps the name to its gradient. `state` is the optimizer's state. `owners` maps each key of
        `state` to the name of a stack, for example "<stack>.m" to "<stack>". A key that all stacks share, such as
        "step", is mapped to None. `numbers` is `(learning rate, clip factor, apply)`.

        Gradients are multiplied by the clip factor. `apply` is 0 or 1. If `apply` is 0, no value changes.

        To save memory, the entries of the updated stacks are removed from `params`, `gradients` and `state`. Shared
        entries stay in `state`.
        """
        lr, factor, apply = numbers
        own_state = {
            key: state.pop(key) if owner else state[key] for key, owner in owners.items() if owner is None or owner in names
        }
        own_params = {name: params.pop(name) for name in names}
        own_gradients = {name: gradients.pop(name) for name in names}
        result: Any = self._update(own_params, own_gradients, own_state, mx.array(lr, mx.float32), factor, apply)
        updated: tuple[Arrays, Arrays] = result
        return updated

    def working_bytes(self, params: Stacks) -> int:
        """Return how many bytes a step needs at its peak for gradients and intermediate arrays. `params` holds the
        adapter's arrays as stacks: arrays of equal shape joined into one. The memory of `params` and of the optimizer's
        state is not counted.
        """
        largest = max(value.nbytes for value in params.arrays.values())
        return params.nbytes + (WORK_COMPILED if compiles() else WORK) * (params.nbytes if self.method.coupled else largest)

    def average(self, params: Stacks, state: Arrays) -> Arrays:
        """Return the moving average of the adapter, as name -> array. `params` holds the adapter's arrays as stacks. A
        stack joins arrays of equal shape along a new first axis. `state` is the optimizer's state, which holds the
        average. The result is `{}` if the optimizer computes no average.
        """
        averages = ema.averages(state)
        return stacks.unstack(averages, params.groups) if averages else {}

    def _clipped_update(
        self, params: Arrays, grads: Arrays, state: Arrays, lr: mx.array, factor: mx.array, apply: mx.array
    ) -> tuple[Arrays, Arrays]:
        """Update the arrays of an adapter by one step, and return `(new arrays, new state)`. `params` and `grads` map
        names to arrays and gradients. `state` is the optimizer's state. `lr` is the learning rate. The gradients are
        multiplied by `factor` first. `apply` is a scalar array, 1 or 0. If it is 0, arrays and state are returned
        unchanged.

        If `apply` is 0, the optimizer gets zeros as gradients. A value that is not finite would otherwise reach the
        result, even with the weight 0.
        """
        finite = {name: mx.where(apply, factor * grad.astype(mx.float32), 0.0) for name, grad in grads.items()}
        return self.method.update(params, finite, state, lr, apply)


def _owner(key: str, groups: stacks.Groups) -> str | None:
    """Return the name of the stack to which an entry of the optimizer's state belongs. A stack joins arrays of equal shape.
    `key` is the entry's key. For "<stack>.m.scale", the result is "<stack>". For an entry that all stacks share, such as
    "step", the result is None. `groups` is a dict whose keys are the names of all stacks.
    """
    name = key.removeprefix(ema.PREFIX)
    while name and name not in groups:
        name = name.rpartition(".")[0]
    return name or None


def global_norm(arrays: Mapping[str, mx.array]) -> mx.array:
    """Return the Euclidean norm of all values of all arrays together. It is a float32 scalar that is not computed yet.

    Squares are added in the order of names. A dict from a file has another order, which would give other last bits.
    """
    squares = [mx.sum(mx.square(arrays[name].astype(mx.float32))) for name in sorted(arrays)]
    return mx.sqrt(mx.sum(mx.stack(squares)))


def clip_factor(norm: mx.array, max_norm: float) -> mx.array:
    """Return the factor that scales gradients down to the global norm `max_norm`, as a scalar array. `norm` is their global norm
    before scaling. If `norm` is smaller than `max_norm`, or if `max_norm` is 0 (no limit), the factor is 1.
    """
    return mx.minimum(1.0, max_norm / (norm + 1e-6)) if max_norm else mx.ones(())


def is_finite(params: Mapping[str, mx.array], state: Mapping[str, mx.array]) -> mx.array:
    """Return True if the global norm of `params` and all scalars in `state` are finite. `params` maps names to the adapter's
    arrays. `state` is the optimizer's state. The result is a boolean scalar that is not computed yet.

    An update can overflow although its gradient is finite. The learning rate, or Prodigy's estimate of it, may be too large.
    """
    numbers = [state[name].astype(mx.float32) for name in sorted(state) if not state[name].ndim]
    return mx.all(mx.isfinite(mx.stack([global_norm(params), *numbers])))
