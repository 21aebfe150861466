"""The stage samples."""

from stages.text_to_image.samples.stage import STAGE

__all__ = ["STAGE"]
