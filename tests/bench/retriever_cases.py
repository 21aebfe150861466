"""The cases of the retriever's benchmark: what is measured, with which settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

SIZES = {
    "base": {"vocab_size": 32128, "d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 12},
    "micro": {"vocab_size": 8192, "d_model": 256, "d_kv": 32, "d_ff": 768, "num_layers": 6, "num_heads": 8},
    "tiny": {"vocab_size": 200, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
}
DIMENSIONS, TARGETS, TEMPERATURE = 128, ("q", "k", "v", "o"), 0.05
TORCH_PLANS = ("eager", "compiled", "transformers", "transformers-compiled")
LIMITS_GB = {"train": 7.5, "encode": 1.5}  # of MLX at base size and 64 pairs: below the memory of compiled PyTorch in training
LIMIT_S = 150  # a case that takes longer is a row with an error, and the next begins


@dataclass(frozen=True)
class RetrieverCase:
    """One configuration to measure. `kind` is "train" or "encode". `plan` is "whole" or "blocks" for MLX, or one of
    `TORCH_PLANS`. `micro_batch` is the number of pairs that are computed at once, 0 for all; below `batch` it is GradCache.
    """

    kind: str = "train"
    backend: str = "mlx"
    plan: str = "whole"
    size: str = "base"
    batch: int = 64
    micro_batch: int = 0
    query: int = 32
    document: int = 256
    rank: int = 16
    dtype: str = "bfloat16"
    steps: int = 20
    memory_gb: float = 0.0  # MLX starts no further operation while this much is in use; 0: no limit

    @property
    def config(self) -> dict[str, Any]:
        return {**SIZES[self.size], "feed_forward_proj": "gated-gelu"}

    def ids(self) -> tuple[np.ndarray, np.ndarray]:
        """Without padding."""
        rng = np.random.default_rng(0)
        most = self.config["vocab_size"]
        return tuple(rng.integers(2, most, (self.batch, n)).astype(np.int32) for n in (self.query, self.document))  # type: ignore[return-value]


def comparison(size: str, batch: int, dtype: str, torch_plans: tuple[str, ...]) -> Iterator[RetrieverCase]:
    """Yield the cases of one comparison: MLX and PyTorch in turn, training and encoding."""
    common = RetrieverCase(size=size, batch=batch, dtype=dtype)
    yield replace(common, memory_gb=LIMITS_GB["train"])
    yield from (replace(common, backend="torch", plan=plan) for plan in torch_plans)
    yield replace(common, kind="encode", memory_gb=LIMITS_GB["encode"])
    yield from (replace(common, kind="encode", backend="torch", plan=plan) for plan in torch_plans)
    yield common
    yield replace(common, kind="encode")
    yield replace(common, plan="blocks")
    yield replace(common, micro_batch=batch // 4)
    yield replace(common, batch=4 * batch, micro_batch=batch // 2, steps=5)
