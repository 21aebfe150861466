"""The stage `units`: functions, methods, classes and windows of lines.

`stage.py` holds the settings and the stage's functions, `python.py` reads Python, `syntax.py` reads other languages with
tree-sitter, `windows.py` cuts any other text. All of them return values of `unit.py`. Nothing outside imports more than STAGE.
"""

from stages.retrieval.units.stage import STAGE

__all__ = ["STAGE"]
