"""The environment that `mlx.launch` and `latentmill launch` give a rank. Does not import MLX: every command asks it."""

from __future__ import annotations

import os
from pathlib import Path

RANK, SIZE = "MLX_RANK", "MLX_WORLD_SIZE"
SECRET = "LATENTMILL_RANKS_SECRET"  # text that only the ranks of a run know
HOSTS, DEVICES = "MLX_HOSTFILE", "MLX_IBV_DEVICES"  # files that list the ranks, for the backends ring and jaccl


def launched_rank() -> int | None:
    """The rank of this process; None: started alone."""
    number = os.environ.get(RANK, "")
    size = os.environ.get(SIZE, "")
    files = [Path(os.environ[name]) for name in (HOSTS, DEVICES) if os.environ.get(name)]
    several = (size.isdecimal() and int(size) > 1) or any(file.is_file() and file.read_text().strip() for file in files)
    return int(number) if number.isdecimal() and several else None
