"""The stage scores."""

from stages.text_to_image.scores.stage import STAGE

__all__ = ["STAGE"]
