"""The checkout, and the folders of data/assets that the program reads, relative to it."""

import shlex
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]  # the repository's folder, where `make` runs
LETTERING = CHECKOUT / "data" / "assets" / "fonts" / "DejaVuSans.ttf"  # Pillow's own font has only the letters of ASCII
MICRO, RETRIEVER, JUDGES = (f"data/assets/{name}" for name in ("micro", "retriever", "judges"))


def shell_path(folder: Path) -> str:
    """Quoted, for `make PROJECT=` in the checkout: relative only if that leads to the same folder from there."""
    usable = folder.is_absolute() or (CHECKOUT / folder).resolve() == folder.resolve()
    return shlex.quote(str(folder if usable else folder.resolve()))
