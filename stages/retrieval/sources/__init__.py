"""The stage `sources`: the files of one or more folders or installed packages, one row each.

`stage.py` holds the settings and the stage's functions, `roots.py` finds the folders, `scan.py` lists their files, `examine.py`
reads one file. Nothing outside this folder imports more than STAGE.
"""

from stages.retrieval.sources.stage import STAGE

__all__ = ["STAGE"]
