"""Facts about the machine and the code that a benchmark row carries: chip, versions, date, commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from stages.tuner.blockwise.device import BUFFER_VARIABLE


def describe(backend: str) -> dict[str, Any]:
    """Where a row was measured. `backend`: "mlx" or "torch"."""
    version = importlib.metadata.version(backend)
    if backend == "torch" and (found := gpu_by_torch()):
        chip = found
    else:
        import mlx.core as mx

        chip = str(mx.device_info().get("device_name") or f"CPU {platform.machine()}")  # MLX has no name for a CPU
    return {
        "chip": chip,
        "version": version,
        "system": platform.system(),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "latentmill": installed_version(),
        "buffer_mb": os.environ.get(BUFFER_VARIABLE, ""),
    }


def gpu_by_torch() -> str:
    """Empty on the CPU."""
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else ""


def installed_version() -> str:
    """Empty if the code runs without being installed."""
    try:
        return importlib.metadata.version("latentmill")
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit(file: Path = Path(__file__)) -> str:
    """With "-dirty" if the checkout differs from it; "" without git, or if it does not track the file."""
    git = ["git", "-C", str(file.parent)]
    try:
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", file.name], capture_output=True, check=False)
        if tracked.returncode:
            return ""
        command = [*git, "describe", "--always", "--dirty", "--exclude=*"]
        described = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return ""
    return "" if described.returncode else described.stdout.strip()
