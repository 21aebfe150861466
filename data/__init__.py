"""What the project ships: `assets` that the program reads, `projects` to run, `docs` to read, `measurements` behind every number
in them, and the `research` scripts that made them. The program imports nothing from here.
"""

from pathlib import Path

import stages as stages  # loads a fast BLAS; a module that imports mlx.core first would multiply 30 times as slowly on Linux

DATA = Path(__file__).parent
ASSETS, DOCS, MEASUREMENTS, PROJECTS = (DATA / name for name in ("assets", "docs", "measurements", "projects"))
EXAMPLE = PROJECTS / "example"
