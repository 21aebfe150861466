"""The scripts that made the bundled family are no package: they import each other by name, and so do their tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "data" / "micro" / "training"))
