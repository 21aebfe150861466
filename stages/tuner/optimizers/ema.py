"""An exponential moving average of the trained arrays: smoother than the last step's arrays, and often the better adapter."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from stages.tuner.optimizers.moments import mean_weights, next_step
from stages.tuner.optimizers.protocol import Arrays, Flag, Optimizer, Params

PREFIX, COUNT = "ema.", "ema_updates"  # keys in the state: one array per trained array, and the number of updates


@dataclass(frozen=True)
class Averaged:
    """An optimizer whose state also holds a moving average of the arrays, so that a resumed run has the same bits.

    It helps if samples differ much from checkpoint to checkpoint (few images, batches of one) and costs the arrays' memory
    again.
    """

    method: Optimizer
    decay: float = 0.99  # for a thousand steps; 0.999 for ten thousand

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must be >= 0 and < 1, got {self.decay}")

    @property
    def coupled(self) -> bool:
        return self.method.coupled

    def init(self, params: Params) -> Arrays:
        return self.method.init(params) | init_average(params)

    def update(
        self, params: Params, grads: Params, state: Arrays, lr: float | mx.array, apply: Flag = True
    ) -> tuple[Arrays, Arrays]:
        inner = {name: value for name, value in state.items() if name != COUNT and not name.startswith(PREFIX)}
        new_params, new_state = self.method.update(params, grads, inner, lr, apply)
        return new_params, new_state | update_average(new_params, state, self.decay, apply)


def init_average(params: Params) -> Arrays:
    return {COUNT: mx.zeros((), mx.int32)} | {PREFIX + name: value for name, value in params.items()}


def update_average(params: Params, state: Params, decay: float, apply: Flag = True) -> Arrays:
    n = state[COUNT].astype(mx.float32)
    # The warm-up form of TensorFlow and diffusers, which forgets the start within some tens of steps.
    _, new = mean_weights(mx.minimum(decay, (1 + n) / (10 + n)), apply)
    averages = {PREFIX + name: state[PREFIX + name] + new * (value - state[PREFIX + name]) for name, value in params.items()}
    return {COUNT: next_step(state[COUNT], apply)} | averages


def averages(state: Params) -> Arrays:
    return {name.removeprefix(PREFIX): value for name, value in state.items() if name.startswith(PREFIX)}
