"""The folders of data/assets that the program reads, relative to the checkout."""

from pathlib import Path

CHECKOUT = Path(__file__).parents[1]  # the repository's folder, where `make` runs
LETTERING = CHECKOUT / "data" / "assets" / "fonts" / "DejaVuSans.ttf"  # Pillow's own font has only the letters of ASCII
MICRO, RETRIEVER, JUDGES = (f"data/assets/{name}" for name in ("micro", "retriever", "judges"))
