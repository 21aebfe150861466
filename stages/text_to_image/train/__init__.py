"""The stage train."""

from stages.text_to_image.train.stage import STAGE

__all__ = ["STAGE"]
