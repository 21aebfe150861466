"""The environment that `mlx.launch` and `latentmill launch` give a rank. Does not import MLX: every command asks it."""

from __future__ import annotations

import os
from pathlib import Path

RANK, SIZE = "MLX_RANK", "MLX_WORLD_SIZE"
SECRET = "LATENTMILL_RANKS_SECRET"  # text that only the ranks of a run know
SECRET_FILE = "LATENTMILL_RANKS_SECRET_FILE"  # a file of it in each rank's home, named so and by "-" and the rank
HOSTS, DEVICES = "MLX_HOSTFILE", "MLX_IBV_DEVICES"  # files that list the ranks, for the backends ring and jaccl


def secret() -> str:
    """The secret of this run; "" if there is none. Its file is deleted. Raises ValueError if it cannot be read."""
    if name := os.environ.pop(SECRET_FILE, ""):
        path = Path.home() / f"{name}-{launched_rank()}"
        try:
            # In the environment, for this process when it starts itself again.
            os.environ[SECRET] = path.read_text("ascii", "replace").strip()
            path.unlink()
        except OSError as error:
            raise ValueError(f"{path}, the secret of this run, cannot be read: {error.strerror}") from None
    return os.environ.get(SECRET, "")


def launched_rank() -> int | None:
    """The rank of this process; None: started alone."""
    number = os.environ.get(RANK, "")
    size = os.environ.get(SIZE, "")
    files = [Path(os.environ[name]) for name in (HOSTS, DEVICES) if os.environ.get(name)]
    several = (size.isdecimal() and int(size) > 1) or any(file.is_file() and file.read_text().strip() for file in files)
    return int(number) if number.isdecimal() and several else None
