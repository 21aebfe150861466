"""One case of the benchmark: what is measured, with which settings."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

UNFUSED = {"MLX_CUDA_USE_CUDNN_SDPA": "0"}  # attention without cuDNN's fused kernel, as Metal trains
TORCH_PLANS = ("eager", "eager+checkpoint", "compiled", "compiled+checkpoint")
KINDS = ("train", "autoencoder", "text_encoder", "loader", "draw", "preview", "decode", "checksums", "commit", "workers")


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
