"""An exponential moving average of the trained arrays: smoother than the last step's, and often the better adapter.

After the update number n, counted from 0, average += (1 - min(decay, (1 + n) / (10 + n))) * (array - average): the
warm-up form, which forgets the start within some tens of steps, as TensorFlow's and diffusers' averages do. The average
is a function of its state and the arrays alone, and travels as arrays; a resumed run has the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from stages.tuner.optimizers.moments import Go, count, weights

Arrays = dict[str, mx.array]

PREFIX, COUNT = "ema.", "ema_updates"


class Method(Protocol):
    """An optimizer: see `optimizer`."""

    def init(self, params: Mapping[str, mx.array]) -> Arrays: ...

    def update(
        self, params: Mapping[str, mx.array], grads: Mapping[str, mx.array], state: Arrays, lr: float | mx.array, go: Go = True
    ) -> tuple[Arrays, Arrays]: ...


@dataclass(frozen=True)
class Averaged:
    """An optimizer that keeps the average of what it trains in its state: one more array per array, "ema.<name>".

    What is done with an optimizer's state (saved, resumed, left as it was where a step is skipped) is so done with the
    average. 0.99 remembers some hundred steps, right for runs of a thousand; 0.999 wants ten thousand. Use it where
    samples swing from checkpoint to checkpoint: small data, batches of one. Costs the adapter's size in memory.
    """

    method: Method
    decay: float = 0.99

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay: {self.decay} is wrong; 0 or more and below 1 is wanted")

    def init(self, params: Mapping[str, mx.array]) -> Arrays:
        """The optimizer's state, and the average at the start."""
        return self.method.init(params) | init(params)

    def update(
        self, params: Mapping[str, mx.array], grads: Mapping[str, mx.array], state: Arrays, lr: float | mx.array, go: Go = True
    ) -> tuple[Arrays, Arrays]:
        """One step of the optimizer, and of the average after it."""
        inner = {name: value for name, value in state.items() if not _is_ours(name)}
        fresh, after = self.method.update(params, grads, inner, lr, go)
        return fresh, after | update(fresh, state, self.decay, go)


def init(params: Mapping[str, mx.array]) -> Arrays:
    """The state of an average that begins at these arrays."""
    return {COUNT: mx.zeros((), mx.int32)} | {PREFIX + name: value for name, value in params.items()}


def update(params: Mapping[str, mx.array], state: Mapping[str, mx.array], decay: float, go: Go = True) -> Arrays:
    """The state after these arrays too, or as it was where no step was taken; other entries of `state` are left out."""
    n = state[COUNT].astype(mx.float32)
    _, new = weights(mx.minimum(decay, (1 + n) / (10 + n)), go)
    moved = {PREFIX + name: state[PREFIX + name] + new * (value - state[PREFIX + name]) for name, value in params.items()}
    return {COUNT: count(state[COUNT], go)} | moved


def arrays(state: Mapping[str, mx.array]) -> Arrays:
    """The averages in a state, by the arrays' own names: an adapter like the one that is trained. Empty where none is kept."""
    return {name.removeprefix(PREFIX): value for name, value in state.items() if name.startswith(PREFIX)}


def _is_ours(name: str) -> bool:
    return name == COUNT or name.startswith(PREFIX)
