"""How stages run: the only code that touches tables on disk, the network or the terminal. `Project` is the Python API.

`commands` may import all other packages; `store` imports none of them and knows no stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.api import Project

__all__ = ["Project"]


def __getattr__(name: str) -> Any:
    # Imported at its first use, so that the console command starts without pyarrow.
    if name == "Project":
        from pipeline.api import Project

        return Project
    raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
