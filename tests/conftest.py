"""Loads the BLAS before MLX, and keeps every test off the network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import stages  # noqa: E402, F401  (before mlx.core)
