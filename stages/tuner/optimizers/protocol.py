"""What an optimizer is: `init(params) -> state` and `update(params, grads, state, lr, apply) -> (params, state)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

import mlx.core as mx

Arrays = dict[str, mx.array]
Params = Mapping[str, mx.array]  # arrays by name
Flag = bool | mx.array  # True or 1 to take a step, False or 0 to leave everything as it is; an array keeps the step lazy


class Optimizer(Protocol):
    """Holds settings only. The state is a flat dict of arrays, stored in a checkpoint as it is. Lazy: reads no value."""

    @property
    def coupled(self) -> bool:
        """Whether one array's update depends on the gradients of others: all must then be updated in one call."""

    def init(self, params: Params) -> Arrays:
        """The state before the first step."""

    def update(
        self, params: Params, grads: Params, state: Arrays, lr: float | mx.array, apply: Flag = True
    ) -> tuple[Arrays, Arrays]:
        """New arrays and state, or the old ones without `apply`. All gradients are finite."""


class Method(Optimizer, Protocol):
    usual_lr: ClassVar[float]  # a good first learning rate
