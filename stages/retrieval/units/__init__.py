"""The stage `units`: functions, methods, classes and windows of lines."""

from stages.retrieval.units.stage import STAGE as STAGE
