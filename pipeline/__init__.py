"""How stages run: the only code that touches tables on disk, the network or the terminal. `Project` is the Python API.

`commands` may import all other packages; `store` imports none of them and knows no stage.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# A standard stream that this process was not given: the next file that is opened would take its number, on Debian ctypes' libffi,
# which stays open. So this comes before other imports.
for _number in range(3):
    try:
        os.fstat(_number)
    except OSError:
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, this one

if TYPE_CHECKING:
    from pipeline.api import Project

__all__ = ["Project"]


def __getattr__(name: str) -> Any:
    # Imported at its first use, so that the console command starts without pyarrow.
    if name == "Project":
        from pipeline.api import Project

        return Project
    raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
