"""One case of a benchmark: what is measured, with which settings."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

UNFUSED = {"MLX_CUDA_USE_CUDNN_SDPA": "0"}  # attention without cuDNN's fused kernel, as Metal trains
TORCH_PLANS = ("eager", "eager+checkpoint", "compiled", "compiled+checkpoint")
KINDS = ("train", "autoencoder", "text_encoder", "loader", "draw", "preview", "decode", "checksums", "commit", "workers")
RETRIEVER_PLANS = ("eager", "compiled", "transformers", "transformers-compiled")  # of PyTorch
RETRIEVER_SIZES = {
    "base": {"vocab_size": 32128, "d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 12},
    "micro": {"vocab_size": 8192, "d_model": 256, "d_kv": 32, "d_ff": 768, "num_layers": 6, "num_heads": 8},
    "tiny": {"vocab_size": 200, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
}


@dataclass(frozen=True)
class Case:
    """One configuration to measure. A field that is left out has its default.

    `plan`, for MLX: "whole", "blocks" or a number of blocks, as in [train] memory, or "plain", which is MLX's ordinary
    gradient of the whole graph without compilation; for PyTorch: one of TORCH_PLANS.
    """

    family: str = "klein-base-4b"
    width: int = 1024  # pixels
    height: int = 1024  # pixels
    plan: str = "blocks"
    bits: int = 16
    rank: int = 32
    optimizer: str = "adamw"
    memory_limited: bool = False  # live memory is held near the plan's estimate, and command buffers are limited, as in training
    unfused: bool = False
    stream: bool = False  # the blocks' weights stay on disk and are read when they are needed, in training and drawing
    exact: bool = False  # float32 products and convolutions in full, as the stage latents computes by default
    backend: str = "mlx"  # or "torch"
    kind: str = "train"  # one of KINDS
    dtype: str = "bfloat16"  # of the encoders; training uses bfloat16, and float32 on a CPU
    ranks: int = 1  # processes that train together, one for each GPU, each with a batch of one image
    workers: int = 1  # processes of a Ray cluster that compute units which only wait
    steps: int = 6  # measured ones, after two to warm up
    prompts: int = 1  # in one batch of a denoising step: 2 with guidance, up to 1024 image tokens
    text_rows: int = 0  # of the caption, in training and drawing; 0: the most that the family reads
    weights: str = ""  # folder with files of the text encoder's weights; empty: random weights are made

    @property
    def image_tokens(self) -> int:
        """Tokens of the image: one per 16 x 16 pixels."""
        return self.width // 16 * (self.height // 16)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """ValueError for anything but an object with some of the fields."""
        known = [field.name for field in fields(cls)]
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f'--case must be a JSON object such as {{"width": 512}}, got {text!r} ({error})') from None
        unknown = sorted(set(given) - set(known)) if isinstance(given, dict) else [text]
        if unknown:
            raise ValueError(f"--case has no field {unknown[0]!r}; there are {', '.join(known)}")
        return cls(**given)


@dataclass(frozen=True)
class RetrieverCase:
    """One configuration to measure. `kind` is "train" or "encode". `plan` is "whole" or "blocks" for MLX, or one of
    RETRIEVER_PLANS. `micro_batch` is the number of pairs that are computed at once, 0 for all; below `batch` it is GradCache.
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
        return {**RETRIEVER_SIZES[self.size], "feed_forward_proj": "gated-gelu"}

    def ids(self) -> tuple[np.ndarray, np.ndarray]:
        """Without padding."""
        rng = np.random.default_rng(0)
        most = self.config["vocab_size"]
        return tuple(rng.integers(2, most, (self.batch, n)).astype(np.int32) for n in (self.query, self.document))  # type: ignore[return-value]
