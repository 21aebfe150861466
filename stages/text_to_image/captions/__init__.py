"""The stage captions."""

from stages.text_to_image.captions.stage import STAGE

__all__ = ["STAGE"]
