"""What an optimizer is: `init(params) -> state` and `update(params, grads, state, lr, apply) -> (params, state)`.

Both are lazy and read no value. A state is a flat dict of arrays only, so that a checkpoint can store it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

import mlx.core as mx

Arrays = dict[str, mx.array]
Params = Mapping[str, mx.array]  # arrays by name
Flag = bool | mx.array  # True or 1 to take a step, False or 0 to leave everything as it is; an array keeps the step lazy


class Optimizer(Protocol):
    """A method that updates float32 arrays by their gradients. It holds settings only. Everything that changes from step to step
    is in the state, a flat dict of arrays.
    """

    @property
    def coupled(self) -> bool:
        """True if the update of one array depends on the gradients of the others. All arrays must then be updated in one call."""

    def init(self, params: Params) -> Arrays:
        """Return the state before the first step, a flat dict of arrays. `params` maps names to the arrays to train."""

    def update(
        self, params: Params, grads: Params, state: Arrays, lr: float | mx.array, apply: Flag = True
    ) -> tuple[Arrays, Arrays]:
        """Take one step and return (new arrays, new state). They have the names, shapes and dtypes of `params` and `state`.
        `params` maps names to arrays. `grads` maps the same names to gradients, all finite. `state` is the result of `init` or of
        the step before. `lr` is the learning rate. `apply` is a bool, or an array that is computed later. If it is false, arrays
        and state are returned unchanged.
        """


class Method(Optimizer, Protocol):
    """The protocol of an optimizer that a user can choose by name in project.toml. It has the methods of `Optimizer`.
    The class attribute `usual_lr` is a good first learning rate for it.
    """

    usual_lr: ClassVar[float]
