"""The stage `images`: the files in the image folder, one row each.

`stage.py` holds the settings and the stage's functions, `scan.py` lists the folder, `examine.py` reads one file,
`duplicates.py` decides which of several equal files is used. Nothing outside this folder imports more than STAGE; the
folder imports `imaging`, `stages.stage`, `stages.settings` and `schemas`.
"""

from stages.text_to_image.images.stage import STAGE

__all__ = ["STAGE"]
