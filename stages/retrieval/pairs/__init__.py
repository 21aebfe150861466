"""The stage `pairs`: queries from docstrings with the documents that answer them, their splits, and why some are not used."""

from stages.retrieval.pairs.stage import STAGE

__all__ = ["STAGE"]
