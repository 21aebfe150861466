"""Which ranks of a LoRA a sample trains: fewer the noisier it is (T-LoRA), or some at random (dropout)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from stages.tuner import draws
from stages.tuner.adapters.targets import Target


class Sample(Protocol):
    @property
    def step(self) -> int: ...

    @property
    def number(self) -> int: ...

    @property
    def sigma(self) -> float: ...


@dataclass(frozen=True)
class RankMasks:
    seed: int
    by_noise: bool = False  # T-LoRA: Soboleva et al. 2025, arXiv 2507.05964
    least: int | None = None  # ranks that pure noise trains; None: half of a Linear's
    dropout: float = 0.0  # share of ranks; kohya's rank_dropout (sd-scripts, networks/lora.py)

    def __call__(self, samples: Sequence[Sample], targets: Sequence[Target]) -> dict[str, mx.array]:
        """Linear -> factor of each rank, (samples, R) float32. A function of seed, step and sample alone."""
        pairs = [target for target in targets if target.variant == "lora"]
        kept = [draws.generator(self.seed, "ranks", s.step, s.number) for s in samples] if self.dropout else []
        by_rank: dict[int, mx.array] = {}
        masks: dict[str, mx.array] = {}
        for target in pairs:
            mask_BR: Any = by_rank.get(target.rank)
            if mask_BR is None:
                mask_BR = by_rank[target.rank] = mx.array(self.of_noise([s.sigma for s in samples], target.rank))
            if kept:
                drawn_BR = np.array([each.random(target.rank) for each in kept]) >= self.dropout
                mask_BR = mask_BR * mx.array(drawn_BR.astype(np.float32) / np.float32(1 - self.dropout))
            masks[target.name] = mask_BR
        return masks

    def of_noise(self, sigmas: Sequence[float], rank: int) -> np.ndarray:
        if not self.by_noise:
            return np.ones((len(sigmas), rank), np.float32)
        active = [active_ranks(sigma, rank, self.least) for sigma in sigmas]
        return (np.arange(rank)[None] < np.array(active)[:, None]).astype(np.float32)


def active_ranks(sigma: float, rank: int, least: int | None = None) -> int:
    """All at sigma 0, `least` at 1."""
    lowest = min(rank, rank // 2 or 1 if least is None else least)
    return int((1 - sigma) * (rank - lowest)) + lowest
