"""The stage images."""

from stages.text_to_image.images.stage import STAGE

__all__ = ["STAGE"]
