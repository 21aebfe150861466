"""The stage `checks`: what may be wrong with images and captions, as measured columns and as warnings."""

from stages.text_to_image.checks.stage import STAGE

__all__ = ["STAGE"]
