"""The stage `sources`: the files of one or more folders or installed packages, one row each."""

from stages.retrieval.sources.stage import STAGE

__all__ = ["STAGE"]
