"""The stage `pairs`: queries from docstrings with the documents that answer them, their splits, and why some are not used.

`stage.py` holds the settings and the stage's functions, `rules.py` judges one pair, `among.py` compares pairs: duplicates, and
training documents that are nearly documents of the test. Nothing outside this folder imports more than STAGE.
"""

from stages.retrieval.pairs.stage import STAGE

__all__ = ["STAGE"]
