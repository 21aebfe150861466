"""The optimizer: Muon for the matrices of the blocks, AdamW for all other weights; and a moving average of the weights.

Muon (Jordan et al. 2024) makes the momentum of a matrix orthogonal before applying it, so that every direction is trained.
Its updates have the scale of Liu et al. 2025, so that a learning rate means the same as for AdamW. Compared with AdamW for all
weights on 24 concepts at batch 16, both at 2e-3, its loss was higher for 100 steps, then equal, then lower (1.029 against
1.046 at step 160).
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of a quintic that moves every singular value towards 1
ROUNDS = 5
MATCH = 0.2  # root mean square of AdamW's updates at the same learning rate


@dataclass(frozen=True)
class Matrix:
    """A weight that Muon trains. `rate` is its learning rate. `rows` has the heights of the matrices that are stacked in
    the weight; each of them is made orthogonal by itself.
    """

    weight: nn.Parameter
    rate: float
    rows: tuple[int, ...]


class Muon:
    """The optimizer Muon for matrices of many shapes. Matrices of one shape are processed together."""

    def __init__(self, matrices: Iterable[Matrix], momentum: float = 0.95, decay: float = 0.05) -> None:
        self.matrices = list(matrices)
        self.momentum = momentum
        self.decay = decay
        self.buffers = [torch.zeros_like(m.weight) for m in self.matrices]

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Update the matrices with their gradients. The learning rate of each matrix is multiplied by `factor`."""
        gradients = [_gradient(m.weight) for m in self.matrices]
        torch._foreach_lerp_(self.buffers, gradients, 1 - self.momentum)
        ahead = torch._foreach_lerp(gradients, self.buffers, self.momentum)
        updates = [rows for m, u in zip(self.matrices, ahead, strict=True) for rows in u.split(m.rows)]
        found = iter(orthogonal(updates))
        for m in self.matrices:
            whole = torch.cat([next(found) for _ in m.rows])
            m.weight.mul_(1 - factor * m.rate * self.decay).add_(whole, alpha=-factor * m.rate)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `load_state_dict` needs to resume the training."""
        return {"buffers": self.buffers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for buffer, saved in zip(self.buffers, state["buffers"], strict=True):
            buffer.copy_(saved)


def _gradient(weight: nn.Parameter) -> Tensor:
    assert weight.grad is not None, "every matrix takes part in every step"
    return weight.grad


def orthogonal(matrices: list[Tensor]) -> list[Tensor]:
    """Return each matrix with all singular values moved near 1, scaled to the size of AdamW's updates. It is computed in
    bfloat16.
    """
    by_shape: dict[torch.Size, list[int]] = {}
    for i, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(i)
    done: list[Tensor] = [torch.empty(0)] * len(matrices)
    for (rows, columns), places in by_shape.items():
        x = torch.stack([matrices[i] for i in places])
        x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
        x = _rounds(x.mT).mT if rows > columns else _rounds(x)
        for i, matrix in zip(places, x.float() * (MATCH * max(rows, columns) ** 0.5), strict=True):
            done[i] = matrix
    return done


def _rounds(x: Tensor) -> Tensor:
    a, b, c = NEWTON_SCHULZ
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x


class Optimizer:
    """Muon and AdamW behind one interface."""

    def __init__(self, matrices: list[Matrix], others: list[dict[str, Any]], device: torch.device) -> None:
        """Build both optimizers. `matrices` are trained with Muon. `others` are parameter groups of AdamW, each with its
        learning rate `lr`.
        """
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(others, betas=(0.9, 0.99), weight_decay=0.0, fused=device.type == "cuda")
        self.rates = [group["lr"] for group in self.adam.param_groups]

    def step(self, factor: float) -> None:
        """Update all weights with their gradients, and clear the gradients. All learning rates are multiplied by `factor`.
        AdamW's gradients are clipped to norm 1.
        """
        loose = [weight for group in self.adam.param_groups for weight in group["params"]]
        torch.nn.utils.clip_grad_norm_(loose, 1.0, foreach=True)
        for group, rate in zip(self.adam.param_groups, self.rates, strict=True):
            group["lr"] = factor * rate
        self.adam.step()
        self.muon.step(factor)
        for weight in (*loose, *(m.weight for m in self.muon.matrices)):
            weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `load_state_dict` needs to resume the training."""
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])


class Average:
    """The moving average of the weights of modules, as modules of their own."""

    def __init__(self, modules: Iterable[nn.Module], decay: float = 0.999) -> None:
        modules = list(modules)
        self.modules = [deepcopy(module).eval().requires_grad_(False) for module in modules]
        self.decay = decay
        self.steps = 0
        self._from = [weight for module in modules for weight in module.parameters()]
        self._to = [weight for module in self.modules for weight in module.parameters()]

    @torch.no_grad()
    def update(self) -> None:
        """Update the average after a step. Its decay starts low, so that it soon forgets the initial weights."""
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self._to, self._from, 1 - decay)


def rate(progress: float, step: int, warm: int = 200, hold: float = 0.45, floor: float = 0.01) -> float:
    """Return the factor of the learning rate. It rises over the first `warm` steps, stays at 1, and then falls to `floor`.
    `progress` is the share of the training time that has passed, 0 to 1. The factor starts to fall at the progress `hold`.
    """
    down = 1.0 if progress < hold else 1 - (1 - floor) * (min(progress, 1.0) - hold) / (1 - hold)
    return min(1.0, (step + 1) / warm) * down
