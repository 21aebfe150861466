"""An exponential moving average of the trained arrays: smoother than the last step's arrays, and often the better adapter.

After update number n, counted from 0: average += (1 - min(decay, (1 + n) / (10 + n))) * (array - average). This is the warm-up
form of TensorFlow and diffusers, which forgets the start within some tens of steps. The average is part of the optimizer's
state, so a resumed run has the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from stages.tuner.optimizers.moments import mean_weights, next_step
from stages.tuner.optimizers.protocol import Arrays, Flag, Optimizer, Params

PREFIX, COUNT = "ema.", "ema_updates"  # keys in the state: one array per trained array, and the number of updates


@dataclass(frozen=True)
class Averaged:
    """An optimizer that adds an exponential moving average of the trained arrays to another optimizer, `method`. The average is
    part of the state, and the function `averages` reads it. `decay` is the average's decay rate per step. 0.99 suits runs of a
    thousand steps, and 0.999 runs of ten thousand. Raises ValueError unless 0 <= decay < 1.

    It helps if samples differ much from checkpoint to checkpoint: with few images, or batches of one. The average takes as much
    memory as the trained arrays.
    """

    method: Optimizer
    decay: float = 0.99

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must be >= 0 and < 1, got {self.decay}")

    @property
    def coupled(self) -> bool:
        """True if the wrapped optimizer's update of one array depends on the gradients of the others."""
        return self.method.coupled

    def init(self, params: Params) -> Arrays:
        """Return the state before the first step. It is the state of the wrapped optimizer and an average. The average starts at
        `params`, a map from names to arrays.
        """
        return self.method.init(params) | init_average(params)

    def update(
        self, params: Params, grads: Params, state: Arrays, lr: float | mx.array, apply: Flag = True
    ) -> tuple[Arrays, Arrays]:
        """Take one step of the wrapped optimizer, then move the average towards the new arrays. Return (new arrays, new state).
        `params` maps names to arrays. `grads` maps the same names to gradients. `state` is the result of `init` or of the step
        before. `lr` is the learning rate. If `apply` is false, arrays and state are returned unchanged.
        """
        inner = {name: value for name, value in state.items() if name != COUNT and not name.startswith(PREFIX)}
        new_params, new_state = self.method.update(params, grads, inner, lr, apply)
        return new_params, new_state | update_average(new_params, state, self.decay, apply)


def init_average(params: Params) -> Arrays:
    """Return the state of a moving average that starts at the arrays `params`. The keys "ema.<name>" have the arrays. The key
    "ema_updates" has the number of updates, 0.
    """
    return {COUNT: mx.zeros((), mx.int32)} | {PREFIX + name: value for name, value in params.items()}


def update_average(params: Params, state: Params, decay: float, apply: Flag = True) -> Arrays:
    """Move a running average towards the arrays `params` (by name) and return its new state. The keys "ema.<name>" have the
    averages. The key "ema_updates" has the number of updates. `state` contains the old average; its other entries are ignored.
    `decay` is the share of the old average that stays. During the first steps, a smaller share stays. If `apply` is false, the
    average is returned unchanged.
    """
    n = state[COUNT].astype(mx.float32)
    _, new = mean_weights(mx.minimum(decay, (1 + n) / (10 + n)), apply)
    averages = {PREFIX + name: state[PREFIX + name] + new * (value - state[PREFIX + name]) for name, value in params.items()}
    return {COUNT: next_step(state[COUNT], apply)} | averages


def averages(state: Params) -> Arrays:
    """Return the moving averages in an optimizer's `state`, by the names of the trained arrays. The result is `{}` if
    the state has no averages.
    """
    return {name.removeprefix(PREFIX): value for name, value in state.items() if name.startswith(PREFIX)}
